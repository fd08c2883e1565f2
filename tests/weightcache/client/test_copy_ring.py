"""`copy_through_lane` copies all bytes in few copies, and never refills a buffer that is not drained, however late."""

import ctypes
import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weightcache.client.lanes import HeedlessLane, LateLane, ThreadLane
from weightcache.client.device_checksum import BLOCK_BYTES, block_sums, checksum_of_sums
from weightcache.client.device_copy import Lane, copy_through_lane
from weightcache.client.spans_policy import Span

PAGE = 4096


class Host:
    """Bytes at an address. The memory holds zeros until a span is ready."""

    def __init__(self, nbytes: int) -> None:
        self.body = random.Random(nbytes).randbytes(nbytes)
        self.memory = ctypes.create_string_buffer(nbytes) if nbytes else None
        self.address = ctypes.addressof(self.memory) if self.memory else 0

    def piecewise(self, *spans: Span) -> Iterator[Span]:
        """Write these spans one after another, and yield each."""
        for begin, end in spans:
            ctypes.memmove(self.address + begin, self.body[begin:end], end - begin)
            yield begin, end


def copy_spans(lane: Lane, host: Host, *spans: Span) -> bytes:
    arena, sums = copy_through_lane(lane, host.address, len(host.body), host.piecewise(*spans))
    body = bytes(arena.numpy())
    assert checksum_of_sums(sums, len(host.body)) == checksum_of_sums(block_sums(memoryview(body)), len(host.body))
    return body


def all_of(host: Host) -> tuple[Span, ...]:
    return ((0, len(host.body)),) if host.body else ()


@pytest.mark.parametrize("kind", [LateLane, ThreadLane])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [0, PAGE, BLOCK_BYTES, 7 * BLOCK_BYTES + PAGE])
def test_all_bytes_arrive(kind: type[LateLane], slots: int, nbytes: int) -> None:
    host = Host(nbytes)
    assert copy_spans(kind(slots=slots), host, *all_of(host)) == host.body


def test_control_refilled_buffer_sends_wrong_bytes() -> None:
    """Negative control: if a buffer is refilled before it is drained, other bytes arrive."""
    host = Host(7 * BLOCK_BYTES)
    assert copy_spans(HeedlessLane(), host, *all_of(host)) != host.body


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=8), st.integers(1, 3), st.integers(1, 2), st.data())
def test_spans_are_copied_once_ready(lengths: list[int], slots: int, blocks: int, data: st.DataObject) -> None:
    """Bytes are read only after they are ready, in any order, and all copies but the last are whole buffers."""
    edges = [sum(lengths[:count]) * PAGE for count in range(len(lengths) + 1)]
    spans = data.draw(st.permutations(list(itertools.pairwise(edges))))
    host, lane = Host(edges[-1]), LateLane(slots=slots, slot_bytes=blocks * BLOCK_BYTES)
    assert copy_spans(lane, host, *spans) == host.body
    assert sum(nbytes != lane.slot_bytes for nbytes in lane.sent) <= 1
    assert len(lane.sent) == -(-len(host.body) // lane.slot_bytes)


class Staging(LateLane):
    """A lane that counts the bytes read from the host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.staged = 0

    def stage(self, slot: int, address: int, nbytes: int) -> None:
        super().stage(slot, address, nbytes)
        self.staged += nbytes


def test_late_span_delays_only_its_own_buffer() -> None:
    """All other buffers are read before the late span is ready."""
    host, lane = Host(4 * BLOCK_BYTES), Staging()
    before: list[int] = []

    def late() -> Iterator[Span]:
        yield from host.piecewise((PAGE, len(host.body)))
        before.append(lane.staged)
        yield from host.piecewise((0, PAGE))

    arena, _ = copy_through_lane(lane, host.address, len(host.body), late())
    assert bytes(arena.numpy()) == host.body
    assert before == [3 * BLOCK_BYTES]


def test_failed_load_fails_the_copy() -> None:
    """The copy fails with the load's error, after the copies that had begun."""

    def failing() -> Iterator[Span]:
        yield 0, 3 * BLOCK_BYTES
        raise OSError("no more")

    host, lane = Host(4 * BLOCK_BYTES), LateLane(slots=3)
    with pytest.raises(OSError, match="no more"):
        copy_through_lane(lane, host.address, len(host.body), failing())
    assert lane.sent == [BLOCK_BYTES] * 3
