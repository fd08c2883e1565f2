"""All bytes arrive, in few copies, and no buffer is filled before it was drained, however late copies run."""

import ctypes
import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weightcache.client.lanes import HeedlessLane, LateLane, ThreadLane
from weightcache.client.device_checksum import BLOCK_BYTES, fold, sums_of
from weightcache.client.device_copy import Lane, send_all
from weightcache.client.spans_policy import Span

PAGE = 4096


class Host:
    """Bytes at an address; before they are ready they are something else."""

    def __init__(self, nbytes: int) -> None:
        self.body = random.Random(nbytes).randbytes(nbytes)
        self.memory = ctypes.create_string_buffer(nbytes) if nbytes else None
        self.address = ctypes.addressof(self.memory) if self.memory else 0

    def piecewise(self, *spans: Span) -> Iterator[Span]:
        """Become ready piece by piece."""
        for begin, end in spans:
            ctypes.memmove(self.address + begin, self.body[begin:end], end - begin)
            yield begin, end


def sent(lane: Lane, host: Host, *spans: Span) -> bytes:
    arena, sums = send_all(lane, host.address, len(host.body), host.piecewise(*spans))
    assert fold(sums, len(host.body)) == fold(sums_of(memoryview(bytes(arena.numpy()))), len(host.body))
    return bytes(arena.numpy())


def all_of(host: Host) -> tuple[Span, ...]:
    return ((0, len(host.body)),) if host.body else ()


@pytest.mark.parametrize("kind", [LateLane, ThreadLane])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [0, PAGE, BLOCK_BYTES, 7 * BLOCK_BYTES + PAGE])
def test_all_of_it(kind: type[LateLane], slots: int, nbytes: int) -> None:
    """Of every length, through every ring."""
    host = Host(nbytes)
    assert sent(kind(slots=slots), host, *all_of(host)) == host.body


def test_control() -> None:
    """Negative control: where a buffer is filled again before it was drained, other bytes arrive."""
    host = Host(7 * BLOCK_BYTES)
    assert sent(HeedlessLane(), host, *all_of(host)) != host.body


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=8), st.integers(1, 3), st.integers(1, 2), st.data())
def test_as_it_becomes_ready(lengths: list[int], slots: int, blocks: int, data: st.DataObject) -> None:
    """However the bytes become ready, none is read before, and what is sent is whole buffers, but for the end."""
    edges = [sum(lengths[:count]) * PAGE for count in range(len(lengths) + 1)]
    spans = data.draw(st.permutations(list(itertools.pairwise(edges))))
    host, lane = Host(edges[-1]), LateLane(slots=slots, slot_bytes=blocks * BLOCK_BYTES)
    assert sent(lane, host, *spans) == host.body
    assert sum(nbytes != lane.slot_bytes for nbytes in lane.sent) <= 1
    assert len(lane.sent) == -(-len(host.body) // lane.slot_bytes)


class Staging(LateLane):
    """Counts what was read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.staged = 0

    def stage(self, slot: int, address: int, nbytes: int) -> None:
        super().stage(slot, address, nbytes)
        self.staged += nbytes


def test_one_part_that_is_late_keeps_no_other_waiting() -> None:
    """All buffers but its own are on their way before it comes."""
    host, lane = Host(4 * BLOCK_BYTES), Staging()
    before: list[int] = []

    def late() -> Iterator[Span]:
        yield from host.piecewise((PAGE, len(host.body)))
        before.append(lane.staged)
        yield from host.piecewise((0, PAGE))

    arena, _ = send_all(lane, host.address, len(host.body), late())
    assert bytes(arena.numpy()) == host.body
    assert before == [3 * BLOCK_BYTES]


def test_what_never_becomes_ready() -> None:
    """A load that fails fails the copy, after the last one ended."""

    def failing() -> Iterator[Span]:
        yield 0, 3 * BLOCK_BYTES
        raise OSError("no more")

    host, lane = Host(4 * BLOCK_BYTES), LateLane(slots=3)
    with pytest.raises(OSError, match="no more"):
        send_all(lane, host.address, len(host.body), failing())
    assert lane.sent == [BLOCK_BYTES] * 3
