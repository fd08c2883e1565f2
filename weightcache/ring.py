"""Bytes through a ring of buffers to a device, as they become ready: few and large copies, no buffer filled before it
was drained.

What a buffer is, and how a copy out of it runs beside everything else, is the lane's; `device.py` has CUDA's.
"""

from collections.abc import Iterable
from typing import Final, Protocol

import torch

from weightcache.checksum import BLOCK_BYTES, blocks_of
from weightcache.policy.spans import Span, Spans, completed

SLOT_BYTES: Final = 32 << 20
SLOTS: Final = 4


class Lane(Protocol):
    """`slots` buffers of `slot_bytes`, whole blocks each. Called from one thread."""

    @property
    def slots(self) -> int:
        """How many copies may be under way."""
        ...

    @property
    def slot_bytes(self) -> int:
        """A multiple of `BLOCK_BYTES`."""
        ...

    def begin(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The device's memory for so many bytes, and for their sums (blocks, 2). Raises torch.OutOfMemoryError."""
        ...

    def wait(self, slot: int) -> None:
        """Until the last copy out of this buffer has ended; at once where there was none."""
        ...

    def stage(self, slot: int, address: int, nbytes: int) -> None:
        """Fill the beginning of the buffer with what is at `address` in this process. Blocking."""
        ...

    def send(self, slot: int, nbytes: int, into: torch.Tensor, sums: torch.Tensor) -> None:
        """Start to copy the buffer's beginning, and then to sum up what arrived. Copies run in the order of calls."""
        ...

    def finish(self) -> None:
        """All copies and sums have ended; the buffers are free."""
        ...


def send_all(lane: Lane, address: int, total: int, ready: Iterable[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's copy of `total` bytes at `address`, and its sums; complete on return.

    `ready` gives the parts that may be read, in any order, each once, until that is all: it may block until there are
    more. A buffer's worth is sent once all of it may be read, so that a part that is late keeps no other waiting.
    Whatever `ready` raises is raised, after the last copy ended.
    """
    arena, sums = lane.begin(total)
    there, step = Spans(total), 0
    try:
        for span in ready:
            for begin, end in completed(span, there.add(*span), lane.slot_bytes, total):
                slot = step % lane.slots
                lane.wait(slot)
                lane.stage(slot, address + begin, end - begin)
                lane.send(slot, end - begin, arena[begin:end], sums[begin // BLOCK_BYTES : blocks_of(end)])
                step += 1
    finally:
        lane.finish()
    assert there.is_whole, "ready ends with all of it"
    return arena, sums
