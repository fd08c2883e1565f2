"""Limit how much is read at once from each source (NVMe, peer, store), and share it fairly among loads.

`fetcher.py` decides which source a chunk is read from; this module decides when the read begins. A slot
allows the first part of a chunk. The reader asks the slot for each later part.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Cancelled
from weightcache.peers.peer_client import Peer
from weightcache.sources.policy.fair_read_queue import (
    FULL_WEIGHT,
    ChunkKey,
    FairReadQueue,
    Flow,
    ReadLimit,
    WaiterIndex,
)

OWNER: Final = "owner"
OwnerKey = tuple[Peer, bool]  # the owner, and whether the chunk is only for the disk


class _SourceQueue:
    """The fair queue and the running reads of one source."""

    def __init__(self, limit: ReadLimit, waiters: WaiterIndex) -> None:
        self.limit = limit
        self.waiters = waiters
        self.fair_queue = FairReadQueue(waiters)
        self.grants: dict[ChunkKey, asyncio.Future[int | None]] = {}
        self.running_parts = 0
        self.running_bytes = 0

    def add(self, key: ChunkKey, nbytes: int) -> "asyncio.Future[int | None]":
        """Queue the chunk. The future gets the number of bytes that may begin, or None once no flow wants the chunk."""
        grant: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.fair_queue.add(key, nbytes)
        self.grants[key] = grant
        self.start_reads()
        return grant

    def start_reads(self) -> None:
        """Start the next reads that fit."""
        while (head := self.fair_queue.peek()) is not None:
            key, remaining_bytes = head
            grant = self.grants[key]
            if grant.cancelled():  # its task has not handled the cancellation yet
                self.withdraw(key)
                continue
            part = self.limit.next_part_bytes(self.running_parts, self.running_bytes, remaining_bytes)
            if part is None:
                return
            self.fair_queue.start_next(part)
            del self.grants[key]
            self.running_parts += 1
            self.running_bytes += part
            grant.set_result(part)

    def withdraw(self, key: ChunkKey) -> None:
        self.fair_queue.remove(key)
        del self.grants[key]

    def leave(self, flow: Flow) -> None:
        for key in self.fair_queue.leave(flow):
            grant = self.grants.pop(key)
            if not grant.done():
                grant.set_result(None)
        self.start_reads()  # the next chunk may be smaller

    def end_part(self, key: ChunkKey, part: int) -> None:
        self.fair_queue.end_part(key)
        self.running_parts -= 1
        self.running_bytes -= part
        self.start_reads()


@dataclass(slots=True, eq=False)
class _ReadSlot:
    """A `ReadSlot`. `part_sizes` are those of its running parts; each ends when as many bytes have arrived."""

    source_queue: _SourceQueue
    key: ChunkKey
    first_part_bytes: int | None  # bytes allowed for the first part, until they are used
    part_sizes: deque[int] = field(default_factory=deque)
    arrived_bytes: int = 0

    async def request_part(self, nbytes: int) -> int:
        """Return how many of the next `nbytes` may be read now."""
        if self.first_part_bytes is not None:
            part_bytes, self.first_part_bytes = min(self.first_part_bytes, nbytes), None
            self.source_queue.running_bytes -= self.part_sizes[0] - part_bytes  # the slot allowed more than is left
            self.part_sizes[0] = part_bytes
            self.source_queue.start_reads()
            return part_bytes
        queue = self.source_queue
        part = await _wait(queue, self.key, nbytes) if queue.waiters.flows_of(self.key) else None
        if part is None:  # no flow wants the chunk any more; a read that has begun still runs to its end
            return queue.limit.next_part_bytes(0, 0, nbytes) or nbytes
        self.part_sizes.append(part)
        return part

    def record_arrival(self, nbytes: int) -> None:
        """Count arrived bytes, and end the parts that are complete."""
        self.arrived_bytes += nbytes
        while self.part_sizes and self.arrived_bytes >= self.part_sizes[0]:
            self.arrived_bytes -= self.part_sizes[0]
            self.source_queue.end_part(self.key, self.part_sizes.popleft())

    def end(self) -> None:
        """End all running parts."""
        while self.part_sizes:
            self.source_queue.end_part(self.key, self.part_sizes.popleft())


class ReadScheduler:
    """The read slots of each tier, and the waits for each peer that owns chunks.

    Each tier and owner has its own limit and queue, so a slow one does not delay reads from another. A read from NVMe
    may hold its slot while it waits for a chunk that a prefetch or healing is writing there.
    """

    def __init__(
        self, read_limits: Mapping[str, ReadLimit], owner_limits: Mapping[OwnerKey, ReadLimit] = MappingProxyType({})
    ) -> None:
        """Make a queue for each tier. `owner_limits`: how many chunks may wait at once for each owner."""
        self._waiters = WaiterIndex()
        self._queues: dict[str | OwnerKey, _SourceQueue] = {}
        for limits in (read_limits, owner_limits):
            self._queues |= {queue_key: _SourceQueue(limit, self._waiters) for queue_key, limit in limits.items()}

    @property
    def running(self) -> dict[str, int]:
        """Return the running parts of chunks by tier. Waits for an owner count as `owner`."""
        return self._count(lambda source_queue: source_queue.running_parts)

    @property
    def queued(self) -> dict[str, int]:
        """Return the queued chunks by tier. Chunks queued for an owner count as `owner`."""
        return self._count(lambda source_queue: len(source_queue.fair_queue))

    def is_wanted(self, key: ChunkKey) -> bool:
        """Return whether any flow waits for the chunk."""
        return bool(self._waiters.flows_of(key))

    def enter(self, flow: Flow, position_by_chunk: Mapping[ChunkKey, int], weight: float = FULL_WEIGHT) -> None:
        """Let `flow` wait for these chunks, in the order of their positions, until `leave`."""
        self._waiters.enter(flow, position_by_chunk)
        for source_queue in self._queues.values():
            source_queue.fair_queue.enter(flow, weight)

    def set_weight(self, flow: Flow, weight: float) -> None:
        """Change the weight of a flow. Does nothing if the flow has left or has not entered yet."""
        if flow in self._waiters:
            for source_queue in self._queues.values():
                source_queue.fair_queue.set_weight(flow, weight)

    def leave(self, flow: Flow) -> None:
        """End the flow's waiting. Chunks that no other flow wants leave the queues."""
        self._waiters.leave(flow)
        for source_queue in self._queues.values():
            source_queue.leave(flow)

    @asynccontextmanager
    async def hold_slot(self, queue_key: str | OwnerKey, key: ChunkKey, nbytes: int) -> AsyncIterator[_ReadSlot]:
        """Hold a slot of a tier to read the chunk, or of an owner to wait until it has the chunk. Raises
        `Refused(Cancelled)` once no flow wants the chunk.
        """
        source_queue = self._queues[queue_key]
        part: int | None = None
        while part is None:
            if not self.is_wanted(key):
                raise Refused(Cancelled())
            part = await _wait(source_queue, key, nbytes)  # after None, a new flow may want the chunk
        slot = _ReadSlot(source_queue, key, part, deque([part]))
        try:
            yield slot
        finally:
            slot.end()

    def _count(self, count: Callable[[_SourceQueue], int]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for queue_key, source_queue in self._queues.items():
            name = queue_key if isinstance(queue_key, str) else OWNER
            counts[name] = counts.get(name, 0) + count(source_queue)
        return counts


async def _wait(source_queue: _SourceQueue, key: ChunkKey, nbytes: int) -> int | None:
    """Wait for the chunk's slot, see `_SourceQueue.add`. A cancellation frees its place in the queue or its slot."""
    grant = source_queue.add(key, nbytes)
    try:
        return await grant
    except asyncio.CancelledError:
        if grant.cancelled():
            if source_queue.grants.get(key) is grant:
                source_queue.withdraw(key)
        elif (part := grant.result()) is not None:
            source_queue.end_part(key, part)
        raise
