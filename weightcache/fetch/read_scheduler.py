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
from weightcache.sources.policy.fair_read_queue import FULL_WEIGHT, FairReadQueue, Flow, Key, ReadLimit, WaiterIndex

OWNER: Final = "owner"
OwnerKey = tuple[Peer, bool]  # the owner, and whether the chunk is only for the disk


class _SourceQueue:
    """The fair queue and the running reads of one source."""

    def __init__(self, room: ReadLimit, wants: WaiterIndex) -> None:
        self.room = room
        self.wants = wants
        self.fair_queue = FairReadQueue(wants)
        self.waiting: dict[Key, asyncio.Future[int | None]] = {}
        self.parts = 0
        self.nbytes = 0

    def queue(self, key: Key, nbytes: int) -> "asyncio.Future[int | None]":
        """Queue the chunk. The future gets the number of bytes that may begin, or None once no flow wants the chunk."""
        turn: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.fair_queue.add(key, nbytes)
        self.waiting[key] = turn
        self.begin()
        return turn

    def begin(self) -> None:
        """Start the next reads that fit."""
        while (following := self.fair_queue.next()) is not None:
            key, left = following
            turn = self.waiting[key]
            if turn.cancelled():  # its task has not handled the cancellation yet
                self.withdraw(key)
                continue
            part = self.room.part(self.parts, self.nbytes, left)
            if part is None:
                return
            self.fair_queue.take(part)
            del self.waiting[key]
            self.parts += 1
            self.nbytes += part
            turn.set_result(part)

    def withdraw(self, key: Key) -> None:
        self.fair_queue.remove(key)
        del self.waiting[key]

    def leave(self, flow: Flow) -> None:
        for key in self.fair_queue.leave(flow):
            turn = self.waiting.pop(key)
            if not turn.done():
                turn.set_result(None)
        self.begin()  # the next chunk may be smaller

    def end(self, key: Key, part: int) -> None:
        self.fair_queue.end(key)
        self.parts -= 1
        self.nbytes -= part
        self.begin()


@dataclass(slots=True, eq=False)
class _ReadSlot:
    """A `ReadSlot`. `counted` has the sizes of its running parts; each ends when as many bytes have arrived."""

    source_queue: _SourceQueue
    key: Key
    first: int | None  # bytes allowed for the first part, until they are used
    counted: deque[int] = field(default_factory=deque)
    came_bytes: int = 0

    async def part(self, nbytes: int) -> int:
        """Return how many of the next `nbytes` may be read now."""
        if self.first is not None:
            begun, self.first = min(self.first, nbytes), None
            self.source_queue.nbytes -= self.counted[0] - begun  # more was allowed than there is to read
            self.counted[0] = begun
            self.source_queue.begin()
            return begun
        part = await _wait(self.source_queue, self.key, nbytes) if self.source_queue.wants.flows_of(self.key) else None
        if part is None:  # no flow wants the chunk any more; a read that has begun still runs to its end
            return self.source_queue.room.part(0, 0, nbytes) or nbytes
        self.counted.append(part)
        return part

    def record_arrival(self, nbytes: int) -> None:
        """Count arrived bytes, and end the parts that are complete."""
        self.came_bytes += nbytes
        while self.counted and self.came_bytes >= self.counted[0]:
            self.came_bytes -= self.counted[0]
            self.source_queue.end(self.key, self.counted.popleft())

    def end(self) -> None:
        """End all running parts."""
        while self.counted:
            self.source_queue.end(self.key, self.counted.popleft())


class ReadScheduler:
    """The read slots of each tier, and the waits for each peer that owns chunks.

    Each tier and owner has its own limit and queue, so a slow one does not delay reads from another. A read from NVMe
    may hold its slot while it waits for a chunk that a prefetch or healing is writing there.
    """

    def __init__(
        self, rooms: Mapping[str, ReadLimit], owner_limits: Mapping[OwnerKey, ReadLimit] = MappingProxyType({})
    ) -> None:
        """Make a queue for each tier. `owner_limits`: how many chunks may wait at once for each owner."""
        self._wants = WaiterIndex()
        self._queues: dict[str | OwnerKey, _SourceQueue] = {}
        for places in (rooms, owner_limits):
            self._queues |= {place: _SourceQueue(room, self._wants) for place, room in places.items()}

    def __repr__(self) -> str:
        return f"<ReadScheduler running={self.running} queued={self.queued}>"

    @property
    def running(self) -> dict[str, int]:
        """Return the running parts of chunks by tier. Waits for an owner count as `owner`."""
        return self._count(lambda source_queue: source_queue.parts)

    @property
    def queued(self) -> dict[str, int]:
        """Return the queued chunks by tier. Chunks queued for an owner count as `owner`."""
        return self._count(lambda source_queue: len(source_queue.fair_queue))

    def is_wanted(self, key: Key) -> bool:
        """Return whether any flow waits for the chunk."""
        return bool(self._wants.flows_of(key))

    def enter(self, flow: Flow, wanted: Mapping[Key, int], weight: float = FULL_WEIGHT) -> None:
        """Let `flow` wait for these chunks, in the order of their positions, until `leave`."""
        self._wants.enter(flow, wanted)
        for source_queue in self._queues.values():
            source_queue.fair_queue.enter(flow, weight)

    def set_weight(self, flow: Flow, weight: float) -> None:
        """Change the weight of a flow. Does nothing if the flow has left or has not entered yet."""
        if flow in self._wants:
            for source_queue in self._queues.values():
                source_queue.fair_queue.set_weight(flow, weight)

    def leave(self, flow: Flow) -> None:
        """End the flow's waiting. Chunks that no other flow wants leave the queues."""
        self._wants.leave(flow)
        for source_queue in self._queues.values():
            source_queue.leave(flow)

    @asynccontextmanager
    async def hold_slot(self, place: str | OwnerKey, key: Key, nbytes: int) -> AsyncIterator[_ReadSlot]:
        """Hold a slot of a tier to read the chunk, or of an owner to wait until it has the chunk. Raises
        `Refused(Cancelled)` once no flow wants the chunk.
        """
        source_queue = self._queues[place]
        first: int | None = None
        while first is None:
            if not self.is_wanted(key):
                raise Refused(Cancelled())
            first = await _wait(source_queue, key, nbytes)  # after None, a new flow may want the chunk
        turn = _ReadSlot(source_queue, key, first, deque([first]))
        try:
            yield turn
        finally:
            turn.end()

    def _count(self, count: Callable[[_SourceQueue], int]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for place, source_queue in self._queues.items():
            name = place if isinstance(place, str) else OWNER
            counts[name] = counts.get(name, 0) + count(source_queue)
        return counts


async def _wait(source_queue: _SourceQueue, key: Key, nbytes: int) -> int | None:
    """Wait for the chunk's slot, see `_SourceQueue.queue`. A cancellation frees its place in the queue or its slot."""
    turn = source_queue.queue(key, nbytes)
    try:
        return await turn
    except asyncio.CancelledError:
        if turn.cancelled():
            if source_queue.waiting.get(key) is turn:
                source_queue.withdraw(key)
        elif (part := turn.result()) is not None:
            source_queue.end(key, part)
        raise
