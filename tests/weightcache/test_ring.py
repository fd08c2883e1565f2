"""All bytes arrive in order, in few copies, and no buffer is filled before it was drained, however late copies run."""

import ctypes
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weightcache.lanes import HeedlessLane, LateLane, ThreadLane
from weightcache.checksum import BLOCK_BYTES, fold, sums_of
from weightcache.ring import Lane, send_all

PAGE = 4096


class Host:
    """Bytes at an address; before they are ready they are something else."""

    def __init__(self, nbytes: int) -> None:
        self.body = random.Random(nbytes).randbytes(nbytes)
        self.memory = ctypes.create_string_buffer(nbytes) if nbytes else None
        self.address = ctypes.addressof(self.memory) if self.memory else 0

    def upto(self, *edges: int) -> Iterator[int]:
        """Become ready piece by piece."""
        begin = 0
        for edge in edges:
            ctypes.memmove(self.address + begin, self.body[begin:edge], edge - begin)
            begin = edge
            yield edge


def sent(lane: Lane, host: Host, *edges: int) -> bytes:
    arena, sums = send_all(lane, host.address, len(host.body), host.upto(*edges))
    assert fold(sums, len(host.body)) == fold(sums_of(memoryview(bytes(arena.numpy()))), len(host.body))
    return bytes(arena.numpy())


@pytest.mark.parametrize("kind", [LateLane, ThreadLane])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [0, PAGE, BLOCK_BYTES, 7 * BLOCK_BYTES + PAGE])
def test_all_of_it(kind: type[LateLane], slots: int, nbytes: int) -> None:
    """Of every length, through every ring."""
    host = Host(nbytes)
    assert sent(kind(slots=slots), host, nbytes) == host.body


def test_control() -> None:
    """Negative control: where a buffer is filled again before it was drained, other bytes arrive."""
    host = Host(7 * BLOCK_BYTES)
    assert sent(HeedlessLane(), host, len(host.body)) != host.body


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=8), st.integers(1, 3), st.integers(1, 2))
def test_as_it_becomes_ready(lengths: list[int], slots: int, blocks: int) -> None:
    """However the bytes become ready, none is read before, and what is sent before the end is whole buffers."""
    edges = [sum(lengths[: count + 1]) * PAGE for count in range(len(lengths))] or [0]
    host, lane = Host(edges[-1]), LateLane(slots=slots, slot_bytes=blocks * BLOCK_BYTES)
    assert sent(lane, host, *edges) == host.body
    assert all(nbytes == lane.slot_bytes for nbytes in lane.sent[:-1])
    assert len(lane.sent) == -(-len(host.body) // lane.slot_bytes)


def test_what_never_becomes_ready() -> None:
    """A load that fails fails the copy, after the last one ended."""

    def failing() -> Iterator[int]:
        yield 3 * BLOCK_BYTES
        raise OSError("no more")

    host, lane = Host(4 * BLOCK_BYTES), LateLane(slots=3)
    with pytest.raises(OSError, match="no more"):
        send_all(lane, host.address, len(host.body), failing())
    assert lane.sent == [BLOCK_BYTES] * 3
