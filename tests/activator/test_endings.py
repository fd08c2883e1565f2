"""How a request ended is told once: at DEBUG where it is one of many, else so that it is seen."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.activator.control import VERSION
from tests.activator.world import world


def _endings(data: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (data / "log").read_text().splitlines()]
    return [line for line in lines if line["message"] == "a request ended"]


@pytest.mark.parametrize(("level", "count"), [("debug", 1), ("info", 0)])
async def test_a_warm_request_is_told_at_debug(tmp_path: Path, level: str, count: int) -> None:
    """By its id, with what came of it; and not at all by default."""

    async with world(tmp_path, log_level=level) as here:
        await here.replica("a")
        got = await here.post()
        await here.control.until_records(1)
        found = _endings(here.data)
        assert [line["request_id"] for line in found] == [got.headers["x-request-id"]] * count
        for line in found:
            seen = (line["outcome"], line["status"], line["cold"], line["version"], line["completion_tokens"])
            assert seen == ("ok", 200, False, VERSION, 2)
