"""Device lanes for tests whose device is this process's memory. The copies are real, and run as late as possible.

`LANES` are these lanes and a CUDA device's, for tests that must pass on each.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from weightcache.client.device_checksum import BLOCK_BYTES, block_count, sum_blocks
from weightcache.client.device_copy import CudaLane

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: there is none here")
Damage = Callable[[int, torch.Tensor], None]  # number of the copy, and the bytes that arrived


def untouched(number: int, arrived: torch.Tensor) -> None:
    """Damage nothing."""


@dataclass
class LateLane:
    """A lane whose copies run when their buffer is waited for, or at the end."""

    slots: int = 2
    slot_bytes: int = BLOCK_BYTES
    damage: Damage = untouched
    sent: list[int] = field(default_factory=list)  # bytes of each copy
    arenas: int = 0
    _due: list[tuple[int, int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._buffers = [torch.zeros(self.slot_bytes, dtype=torch.uint8) for _ in range(self.slots)]

    def begin(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.arenas += 1
        return torch.empty(nbytes, dtype=torch.uint8), torch.zeros((block_count(nbytes), 2), dtype=torch.int64)

    def wait(self, slot: int) -> None:
        while any(due == slot for due, *_ in self._due):
            self._run()

    def stage(self, slot: int, address: int, nbytes: int) -> None:
        ctypes.memmove(self._buffers[slot].data_ptr(), address, nbytes)

    def send(self, slot: int, nbytes: int, into: torch.Tensor, sums: torch.Tensor) -> None:
        self._due.append((slot, nbytes, into, sums))

    def finish(self) -> None:
        while self._due:
            self._run()

    def _run(self) -> None:
        slot, nbytes, into, sums = self._due.pop(0)
        into.copy_(self._buffers[slot][:nbytes])
        self.damage(len(self.sent), into)
        self.sent.append(nbytes)
        sum_blocks(into, sums)


class HeedlessLane(LateLane):
    """A lane that does not wait until a buffer is drained."""

    def wait(self, slot: int) -> None:
        pass


class ThreadLane(LateLane):
    """A lane whose copies run in a thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._thread = ThreadPoolExecutor(1)
        self._last: dict[int, Future[None]] = {}

    def wait(self, slot: int) -> None:
        if slot in self._last:
            self._last[slot].result(30)

    def send(self, slot: int, nbytes: int, into: torch.Tensor, sums: torch.Tensor) -> None:
        super().send(slot, nbytes, into, sums)
        self._last[slot] = self._thread.submit(self._run)

    def finish(self) -> None:
        for slot in list(self._last):
            self.wait(slot)


LANES = [
    pytest.param(LateLane, id="late"),
    pytest.param(ThreadLane, id="in a thread"),
    pytest.param(
        lambda: CudaLane(torch.device("cuda", 0), slot_bytes=BLOCK_BYTES, slots=2),
        id="cuda",
        marks=[pytest.mark.gpu, needs_device],
    ),
]
