"""A lease's bytes on a device: one arena, filled through a ring of pinned buffers, copies overlapped by streams.

The CPU fills a buffer while the device drains the others; an event tells when a buffer may be filled again.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch

from weightcache.client import Lease
from weightcache.tensors import DTYPES

SLOT_BYTES: Final = 32 << 20
SLOTS: Final = 4


class PinnedRing:
    """Page-locked buffers, registered once: make it while the process parks, use it for each restore."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self.slot_bytes = slot_bytes
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.buffers = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(slots)]
        self.drained = [torch.cuda.Event() for _ in range(slots)]  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """`tensors` are views of `arena`, which holds the version's linear space."""

    arena: torch.Tensor
    tensors: dict[str, torch.Tensor]


def copy_to_device(lease: Lease, device: torch.device, ring: PinnedRing) -> DeviceWeights:
    """Returns when all bytes are there. The lease may be closed then. Raises torch.OutOfMemoryError."""
    arena = torch.empty(lease.total_bytes, dtype=torch.uint8, device=device)
    ring.stream.wait_stream(torch.cuda.current_stream(device))  # the arena's memory may be in use until then
    with torch.cuda.stream(ring.stream):
        for step, begin in enumerate(range(0, lease.total_bytes, ring.slot_bytes)):
            slot = step % len(ring.buffers)
            length = min(ring.slot_bytes, lease.total_bytes - begin)
            buffer = ring.buffers[slot]
            ring.drained[slot].synchronize()  # returns at once where it was never recorded
            ctypes.memmove(buffer.data_ptr(), lease.address + begin, length)
            arena[begin : begin + length].copy_(buffer[:length], non_blocking=True)
            ring.drained[slot].record(ring.stream)
    ring.stream.synchronize()
    views = {
        tensor.name: arena[tensor.offset : tensor.offset + tensor.nbytes].view(DTYPES[tensor.dtype]).view(tensor.shape)
        for tensor in lease.manifest.tensors
    }
    return DeviceWeights(arena, views)
