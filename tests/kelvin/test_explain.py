"""What `kelvin explain start` says beside its forecast."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kelvin.client import Target
from kelvin.explain import explain_command

VERSION = "6756b70454e7" + "0" * 52
FORECAST = {
    "model": "m",
    "versions": [
        {"version": VERSION, "aliases": ["prod"], "expected": None, "standbys": 1, "wake_s": None, "past": []},
    ],
}


class Scripted(Target):
    """An installation whose admin API is a table."""

    answers: dict[str, Any]

    def door(self, key_file: str = "admin.key") -> httpx.Client:
        """Return a client of the table."""

        def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json=self.answers[request.url.path])

        return httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("problem", "last", "want"),
    [
        pytest.param(
            {"reason": "no_room", "message": "all 1 device slots of this machine are taken"}, None,
            "m@6756b70454e7: all 1 device slots of this machine are taken", id="a full machine",
        ),
        pytest.param(
            None, {"failure": "chunk_corrupt: chunk 2fb0"}, "m: its last start: chunk_corrupt: chunk 2fb0",
            id="a damaged chunk that nobody asks for now",
        ),
        pytest.param(None, None, None, id="nothing is wrong"),
    ],
)  # fmt: skip
def test_explain_start_says_why_none_comes(
    problem: dict[str, str] | None, last: dict[str, str] | None, want: str | None
) -> None:
    """A forecast in milliseconds is no answer where the start can't come."""
    versions = [{"version": VERSION, "start_problem": problem}]
    installation = Scripted(Path("nowhere"))
    object.__setattr__(installation, "answers", {
        "/admin/v1/models/m/starts": FORECAST,
        "/admin/v1/models/m": {"model": "m", "state": "zero", "last_restore": last, "versions": versions},
    })  # fmt: skip
    said = CliRunner().invoke(explain_command, ["start", "m"], obj=installation)
    assert said.exit_code == 0
    lines = said.output.splitlines()
    assert lines[0] == "m@6756b70454e7 (prod)"
    assert lines[2:] == ([] if want is None else [want])
