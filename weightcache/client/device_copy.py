"""The tensors of a lease: views of its mapping without a copy, or of a copy on a device.

The mapping is read-only: a write to such a view is a SIGSEGV, by design.

On a device, one arena holds all bytes. It is filled through a ring of buffers, and compared with a seal's checksums or,
without a seal, with the host's bytes. Bytes go through the ring as they become ready: few, large copies, and no buffer
is refilled before it was drained. A `Lane` defines the buffers and how copies run concurrently.

With `CudaLane`, the CPU fills a pinned buffer while the device drains the others. An event signals when a buffer may be
filled again. A second stream sums the bytes that arrived in device memory while the next copies run.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from kelvin.contracts.artifact_errors import AttestationInvalid, ChunkCorrupt
from kelvin.contracts.artifacts.manifest import Manifest, Tensor
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.errors import Failure, Refused
from weightcache.client.device_checksum import (
    BLOCK_BYTES,
    block_count,
    block_keys,
    block_sums,
    checksum_of,
    checksum_of_sums,
    sum_blocks,
)
from weightcache.client.lease import Lease
from weightcache.client.spans_policy import Span, Spans, completed_pieces
from weightcache.sources.source import is_digest_of

log = logging.getLogger(__name__)

ATTEMPTS: Final = 2  # one bad copy does not prove bad memory
STAGING_THREADS: Final = 4  # one core copies slower than a device's bus

SLOT_BYTES: Final = 32 << 20
SLOTS: Final = 4


DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def view_tensors(lease: Lease) -> dict[str, torch.Tensor]:
    """Return the tensors by name, in the manifest's order. They keep the lease alive, but not its mapping.

    The lease must be whole: bytes of a progressive lease that are not ready may be unmapped, and reading them is a
    SIGSEGV.
    """
    if not lease.total_bytes:
        return {tensor.name: _empty(tensor) for tensor in lease.manifest.tensors}
    # A ctypes buffer claims to be writable; for a read-only one torch would print a warning per tensor.
    buffer = (ctypes.c_ubyte * lease.total_bytes).from_address(lease.address)
    buffer._lease = lease  # type: ignore[attr-defined]
    lease.track_buffer(buffer)
    return {tensor.name: _view_tensor(buffer, tensor) for tensor in lease.manifest.tensors}


def _view_tensor(buffer: object, tensor: Tensor) -> torch.Tensor:
    dtype = DTYPES[tensor.dtype]
    count = tensor.nbytes // dtype.itemsize
    if not count:
        return _empty(tensor)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=tensor.offset)
    return flat.view(tensor.shape)


def _empty(tensor: Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])


class Lane(Protocol):
    """A ring of `slots` buffers of `slot_bytes` each, whole blocks, to one device. Call it from one thread."""

    @property
    def slots(self) -> int:
        """Return how many copies may run at once."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Return the size of a buffer, a multiple of `BLOCK_BYTES`."""
        ...

    def begin(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return device memory for `nbytes` bytes, and for their sums (blocks, 2). Raises torch.OutOfMemoryError."""
        ...

    def wait(self, slot: int) -> None:
        """Wait until the last copy from this buffer has ended. Returns at once if there was none."""
        ...

    def stage(self, slot: int, address: int, nbytes: int) -> None:
        """Fill the start of the buffer from `address` in this process. Blocking."""
        ...

    def send(self, slot: int, nbytes: int, into: torch.Tensor, sums: torch.Tensor) -> None:
        """Start to copy the start of the buffer, then to sum the bytes that arrived. Copies run in call order."""
        ...

    def finish(self) -> None:
        """Wait until all copies and sums have ended. The buffers are free then."""
        ...


def copy_through_lane(lane: Lane, address: int, total: int, ready: Iterable[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy `total` bytes at `address` to the device. Return the complete copy and its sums.

    `ready` yields the readable parts in any order, each once, until they are complete; it may block. A buffer's worth
    is sent once all of it is readable, so a late part does not delay others. Exceptions of `ready` are raised after the
    last copy ended.
    """
    arena, sums = lane.begin(total)
    copied_spans, step = Spans(total), 0
    try:
        for span in ready:
            for begin, end in completed_pieces(span, copied_spans.add(*span), lane.slot_bytes, total):
                slot = step % lane.slots
                lane.wait(slot)
                lane.stage(slot, address + begin, end - begin)
                lane.send(slot, end - begin, arena[begin:end], sums[begin // BLOCK_BYTES : block_count(end)])
                step += 1
    finally:
        lane.finish()
    assert copied_spans.is_whole, "ready ends with all of it"
    return arena, sums


class CudaLane:
    """Pinned buffers to a CUDA device, registered once while the process is parked and used for each restore."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        assert slot_bytes % BLOCK_BYTES == 0
        self.device = device
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._checks = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(slots)]
        self._copied = [torch.cuda.Event() for _ in range(slots)]  # type: ignore[no-untyped-call]
        self._staging_threads = ThreadPoolExecutor(min(STAGING_THREADS, len(os.sched_getaffinity(0))), "stage")
        block_keys(device)
        torch.cuda.synchronize(device)

    def __repr__(self) -> str:
        return f"<CudaLane {self.device} {self.slots} x {self.slot_bytes >> 20} MiB>"

    def begin(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        arena = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        sums = torch.zeros((block_count(nbytes), 2), dtype=torch.int64, device=self.device)
        for stream in (self._copies, self._checks):  # until then, the current stream may use the memory
            stream.wait_stream(torch.cuda.current_stream(self.device))
        return arena, sums

    def wait(self, slot: int) -> None:
        self._copied[slot].synchronize()  # returns at once if it was never recorded

    def stage(self, slot: int, address: int, nbytes: int) -> None:
        copy_in_parts(self._staging_threads, self._buffers[slot].data_ptr(), address, nbytes)

    def send(self, slot: int, nbytes: int, into: torch.Tensor, sums: torch.Tensor) -> None:
        with torch.cuda.stream(self._copies):
            into.copy_(self._buffers[slot][:nbytes], non_blocking=True)
            self._copied[slot].record(self._copies)
        with torch.cuda.stream(self._checks):
            self._checks.wait_event(self._copied[slot])
            sum_blocks(into, sums)

    def finish(self) -> None:
        self._copies.synchronize()
        self._checks.synchronize()


def copy_in_parts(threads: ThreadPoolExecutor, target: int, source: int, nbytes: int) -> None:
    """Copy with several threads, one block or more each. Blocking."""
    share = -(-nbytes // STAGING_THREADS // BLOCK_BYTES) * BLOCK_BYTES
    parts = [
        threads.submit(ctypes.memmove, target + begin, source + begin, min(share, nbytes - begin))
        for begin in range(0, nbytes, share)
    ]
    for part in parts:
        part.result()


class Lanes:
    """One lane per device, kept for the life of the process.

    A lane is made while the process is parked, or by its first restore if that comes sooner. Page-locking memory and
    the first use of CUDA take longer than many restores. Only forked processes use this; the zygote touches no device.
    """

    def __init__(
        self,
        make: Callable[[torch.device], Lane] = CudaLane,
        count: Callable[[], int] = torch.cuda.device_count,  # torch uses NVML if it can, which makes no context
    ) -> None:
        self._make = make
        self._count = count
        self._lanes: dict[torch.device, Lane] = {}

    @property
    def has_device(self) -> bool:
        """Return whether this machine has a device."""
        return self._count() > 0

    def prepare(self) -> None:
        """Make the lane to the first device, if any. A step of a parked standby's warm-up."""
        if self.has_device:
            self.lane_for(torch.device("cuda", 0))

    def lane_for(self, device: torch.device) -> Lane:
        """Return the lane to the device, made on first use."""
        if device not in self._lanes:
            self._lanes[device] = self._make(device)
        return self._lanes[device]


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """Weights on a device. `tensors` are views of `arena`, which holds the linear space with this checksum."""

    arena: torch.Tensor
    tensors: dict[str, torch.Tensor]
    checksum: str


def agreed_checksum(attestations: Iterable[SealAttestation]) -> str | None:
    """Return the seals' checksum of the version's bytes, or None if no seal has one or they contradict each other."""
    checksums = {seal.device_checksum for seal in attestations} - {None}
    return checksums.pop() if len(checksums) == 1 else None


def copy_to_device(lease: Lease, lane: Lane, sealed_checksum: str | None) -> DeviceWeights:
    """Copy a lease's bytes to the device and verify them there. Parts are copied as soon as they are ready.

    `sealed_checksum` is from a seal. Without one, the lease's bytes are hashed again and summed, which takes longer
    than the copy. The lease may be closed afterwards. Raises `Refused` if wrong bytes arrive twice or the lease fails,
    and torch.OutOfMemoryError.
    """
    total = lease.total_bytes
    wanted_checksum = sealed_checksum
    for attempt in range(1, ATTEMPTS + 1):
        arena, sums = copy_through_lane(lane, lease.address, total, lease.ready_parts())
        wanted_checksum = wanted_checksum or _verified_checksum(lease)
        if checksum_of_sums(sums, total) == wanted_checksum:
            return DeviceWeights(arena, _device_tensors(lease.manifest, arena), wanted_checksum)
        log.error("wrong bytes arrived on the device", extra={"version": lease.version, "attempt": attempt})
        del arena  # free the memory before the next attempt
    raise Refused(_find_damage(lease, sums))


def _verified_checksum(lease: Lease) -> str:
    """Return the checksum of the lease's bytes, after checking their digests: the checksum will be signed."""
    if (wrong := _find_wrong_chunk(lease)) is not None:
        raise Refused(ChunkCorrupt(wrong, "host"))
    return checksum_of(lease.view(0, lease.total_bytes))


def _find_wrong_chunk(lease: Lease) -> str | None:
    """Return the first chunk on the host that does not match its digest, or None."""
    begin = 0
    for chunk in lease.manifest.chunks:
        if not is_digest_of(lease.view(begin, chunk.length), chunk.digest):
            return chunk.digest
        begin += chunk.length
    return None


def _device_tensors(manifest: Manifest, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        tensor.name: arena[tensor.offset : tensor.offset + tensor.nbytes].view(DTYPES[tensor.dtype]).view(tensor.shape)
        for tensor in manifest.tensors
    }


def _find_damage(lease: Lease, sums: torch.Tensor) -> Failure:
    """Return which chunk is wrong: on the device, or on the host since its check. Slow, and rare."""
    device_sums, host_sums = sums.cpu(), block_sums(lease.view(0, lease.total_bytes))
    differing = (device_sums != host_sums).any(dim=1)
    begin = 0
    for chunk in lease.manifest.chunks:
        end = begin + chunk.length
        if differing[begin // BLOCK_BYTES : block_count(end)].any():
            return ChunkCorrupt(chunk.digest, "device")
        begin = end
    if (wrong := _find_wrong_chunk(lease)) is not None:
        return ChunkCorrupt(wrong, "host")
    return AttestationInvalid(lease.version, "its checksum is not that of the version's bytes")
