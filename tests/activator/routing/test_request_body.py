"""The activator decodes a request body once, and forwards it unchanged."""

import json
from pathlib import Path
from typing import TypedDict

import pytest

from tests.activator.decode_counting import MARK
from tests.activator.world import CHAT, world

BODY = json.dumps(CHAT | {"user": MARK, "pad": "x" * 40_000}, indent=1).encode()


class Counted(TypedDict, total=False):
    """Settings of `decode_counting.py`."""

    planted: int


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        pytest.param(Counted(), 1, id="one decode"),
        pytest.param(Counted(planted=1), 2, id="control: a second decode is detected"),
    ],
)
async def test_body_is_decoded_once(tmp_path: Path, settings: Counted, want: int) -> None:
    """One decode per request, whole or streamed, served or refused. The replica gets the same bytes."""
    counted = tmp_path / "counted"

    async with world(tmp_path, program="tests.activator.decode_counting", **settings, counted=counted) as here:
        replica = await here.replica("a")
        assert (await here.post(body=BODY)).status == 200
        assert replica.calls[0].body == BODY
        assert len(counted.read_bytes()) == want
        assert (await here.post(body=BODY.replace(b'"model"', b'"stream": true, "model"'))).status == 200
        assert len(counted.read_bytes()) == 2 * want
        assert (await here.post(body=BODY.replace(b'"m"', b'"n"'))).status == 404
        assert len(counted.read_bytes()) == 3 * want
