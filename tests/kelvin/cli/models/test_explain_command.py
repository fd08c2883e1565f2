"""`kelvin explain start` prints the forecast, and the reason if a start can't succeed."""

import pytest
from click.testing import CliRunner

from kelvin.cli.models.explain_command import explain_command
from tests.kelvin.cli_targets import installation_answering

VERSION = "6756b70454e7" + "0" * 52
FORECAST = {
    "model": "m",
    "versions": [
        {"version": VERSION, "aliases": ["prod"], "expected": None, "standbys": 1, "wake_s": None, "past": []},
    ],
}


@pytest.mark.parametrize(
    ("problem", "last", "want"),
    [
        pytest.param(
            {"reason": "no_room", "message": "all 1 device slots of this machine are taken"}, None,
            "m@6756b70454e7: all 1 device slots of this machine are taken", id="a full machine",
        ),
        pytest.param(
            None, {"failure": "chunk_corrupt: chunk 2fb0"}, "m: its last start: chunk_corrupt: chunk 2fb0",
            id="a damaged chunk, without waiting requests",
        ),
        pytest.param(None, None, None, id="nothing is wrong"),
    ],
)  # fmt: skip
def test_explain_start_says_why_none_comes(
    problem: dict[str, str] | None, last: dict[str, str] | None, want: str | None
) -> None:
    """If a start can't succeed, the reason is printed as well, because a forecast alone would mislead."""
    versions = [{"version": VERSION, "start_problem": problem}]
    model = {"model": "m", "state": "zero", "last_restore": last, "versions": versions}
    installation = installation_answering(FORECAST, model)
    result = CliRunner().invoke(explain_command, ["start", "m"], obj=installation)
    assert result.exit_code == 0
    assert [request.url.path for request in installation.requests] == [
        "/admin/v1/models/m/starts",
        "/admin/v1/models/m",
    ]
    lines = result.output.splitlines()
    assert lines[0] == "m@6756b70454e7 (prod)"
    assert lines[2:] == ([] if want is None else [want])
