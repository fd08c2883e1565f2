"""A body's deadline grows with each received byte, so that a slow connection is told from a dead one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
from starlette.requests import Request

from kelvin.contracts.errors import BodyTooLarge, InvalidRequest, Refused
from kelvin.contracts.traffic_errors import DeadlineExceeded
from snapshotter.intake.request_bodies import MIN_BYTES_PER_S, read_body, read_exactly


class SlowRequest:
    """A request whose pieces come after pauses, in virtual time."""

    def __init__(self, pieces: Sequence[tuple[float, bytes]]) -> None:
        self.headers: dict[str, str] = {}
        self._pieces = pieces

    async def stream(self) -> AsyncIterator[bytes]:
        for pause_s, piece in self._pieces:
            await asyncio.sleep(pause_s)
            yield piece


async def read(pieces: Sequence[tuple[float, bytes]], limit: int = 1 << 30, timeout_s: float = 10.0) -> bytes:
    return bytes(await read_body(cast(Request, SlowRequest(pieces)), limit, timeout_s=timeout_s))


SECOND = bytes(MIN_BYTES_PER_S)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("pieces", "late_s"),
    [
        pytest.param([(1.0, SECOND)] * 60, None, id="a minute at the least rate"),
        pytest.param([(9.0, b"x")], None, id="late, but in time"),
        pytest.param([(11.0, b"x")], 10.0, id="nothing"),
        pytest.param([(1.0, b"x")] * 60, 10.0 + 10 / MIN_BYTES_PER_S, id="a byte a second"),
        pytest.param([(1.0, SECOND)] * 5 + [(11.0, b"x")], 15.0, id="a connection that dies"),
    ],
)
async def test_slow_body_is_refused(pieces: Sequence[tuple[float, bytes]], late_s: float | None) -> None:
    """The deadline is ten seconds, and one more for each 64 KiB. The refusal names the time waited."""
    if late_s is None:
        assert await read(pieces) == b"".join(piece for _, piece in pieces)
    else:
        with pytest.raises(Refused) as caught:
            await read(pieces)
        assert caught.value.failure == DeadlineExceeded(late_s, "receiving the body")


async def test_wrong_length_is_refused() -> None:
    """Too many bytes are refused while they come, and too few at the end."""
    with pytest.raises(Refused) as caught:
        await read([(0.0, b"abc")], limit=2)
    assert caught.value.failure == BodyTooLarge(2)
    with pytest.raises(Refused) as caught:
        await read_exactly(cast(Request, SlowRequest([(0.0, b"abc")])), 4, "chunk")
    assert caught.value.failure == InvalidRequest("chunk", "3 bytes", "must have exactly 4")
