"""Decide which waiting chunk a source reads next: fair queueing by version and weight, not first come, first served.

Pure. Start-time fair queueing with many concurrent requests (SFQ(D): Goyal, Vin and Cheng, 1996; MSF-SFQ(D): Jin, Chase
and Kaur, 2004). A part of a version's chunk is tagged with the virtual time at which its share allows it to start. The
lowest tag is next. While two versions wait, the bytes that each got, divided by its weight, differ by at most one part
of each.

Virtual time is the lowest tag of running parts. A new version starts there, as if it had been waiting when those parts
began. So the first version of a burst, whose chunks took all slots, waits until the others have had as many.
"""

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final, Protocol

FULL_WEIGHT: Final = 1.0  # weight of a version that a lease or start waits for
PREFETCH_WEIGHT: Final = 1 / 16  # weight of a version that nothing waits for yet
# A flow may be late because it waited for memory or a peer. It then catches up at most so many bytes per unit of
# weight.
MAX_CREDIT_BYTES: Final = 64 << 20

Flow = Hashable  # identifies one load of a version while it waits
ChunkKey = tuple[str, str]  # tenant, digest

_NOBODY: Final[Mapping[Flow, int]] = MappingProxyType({})


class WaiterIndex:
    """The chunks of each flow, and the flows of each chunk. All sources share one index."""

    def __init__(self) -> None:
        self._by_flow: dict[Flow, Mapping[ChunkKey, int]] = {}
        self._by_key: dict[ChunkKey, dict[Flow, int]] = {}

    def __repr__(self) -> str:
        return f"<WaiterIndex flows={len(self._by_flow)} chunks={len(self._by_key)}>"

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._by_flow

    def enter(self, flow: Flow, position_by_chunk: Mapping[ChunkKey, int]) -> None:
        """Let the flow wait for these chunks, in the order of their positions, until `leave`."""
        assert flow not in self._by_flow
        self._by_flow[flow] = position_by_chunk
        for key, position in position_by_chunk.items():
            self._by_key.setdefault(key, {})[flow] = position

    def leave(self, flow: Flow) -> None:
        """End the flow's waiting."""
        for key in self._by_flow.pop(flow):
            flows = self._by_key[key]
            del flows[flow]
            if not flows:
                del self._by_key[key]

    def chunks_of(self, flow: Flow) -> Mapping[ChunkKey, int]:
        """Return the flow's positions by chunk."""
        return self._by_flow[flow]

    def flows_of(self, key: ChunkKey) -> Mapping[Flow, int]:
        """Return the chunk's positions by flow; empty if no flow wants it."""
        return self._by_key.get(key, _NOBODY)


def positions_by_chunk(digests: Iterable[str], tenant: str) -> dict[ChunkKey, int]:
    """Return the position of each chunk in its version's linear space."""
    return {(tenant, digest): position for position, digest in enumerate(digests)}


class ReadLimit(Protocol):
    """A limit of concurrent reads of a source."""

    def next_part_bytes(self, running_parts: int, running_bytes: int, remaining_bytes: int) -> int | None:
        """Return how many of a chunk's `remaining_bytes` may start now; None: none now. `running_parts` parts
        with `running_bytes` together are running. If there are none, some bytes must be allowed.
        """


@dataclass(frozen=True, slots=True)
class ChunkCountLimit:
    """A `ReadLimit` of `at_once` chunks of any length, each in one part."""

    at_once: int

    def next_part_bytes(self, running_parts: int, running_bytes: int, remaining_bytes: int) -> int | None:
        """Return `remaining_bytes`, or None if too many chunks are running."""
        return remaining_bytes if running_parts < self.at_once else None


@dataclass(slots=True)
class _FlowState:
    weight: float
    arrival_number: int  # arrival order, which breaks ties of tags
    finish_tag: float = 0.0  # the tag at which its next part may start
    heap: list[tuple[int, ChunkKey]] = field(default_factory=list)  # entries that are no longer queued are skipped


class FairReadQueue:
    """Chunks that wait for one source, or for their next part. Flows must enter and leave `waiters` first.

    A chunk may be wanted by several versions; the first whose turn comes pays for it. Within a version, chunks come in
    the order of its linear space, in which a model needs them. Of versions with equal tags, the earlier one is first.
    """

    def __init__(self, waiters: WaiterIndex) -> None:
        self._waiters = waiters
        self._virtual_time = 0.0  # virtual time, in bytes per weight; no running part ever had a lower tag
        self._running: dict[ChunkKey, deque[float]] = {}  # tags of its running parts, in order of start
        self._states: dict[Flow, _FlowState] = {}
        self._queued: dict[ChunkKey, int] = {}  # remaining bytes
        self._flow_count = 0

    def __len__(self) -> int:
        return len(self._queued)

    def enter(self, flow: Flow, weight: float = FULL_WEIGHT) -> None:
        """Add a flow with this weight, relative to other flows. Its share begins now, even if it queues a little later.
        Bandwidth that other flows used before is not made up for.
        """
        assert weight > 0
        assert flow not in self._states
        state = self._states[flow] = _FlowState(weight, self._flow_count, self._virtual_time)
        self._flow_count += 1
        for key, position in self._waiters.chunks_of(flow).items():
            if key in self._queued:
                heappush(state.heap, (position, key))

    def set_weight(self, flow: Flow, weight: float) -> None:
        """Change the flow's weight. Its lead over virtual time is scaled to the new weight."""
        assert weight > 0
        state = self._states[flow]
        lead = max(0.0, state.finish_tag - self._virtual_time)
        state.finish_tag = self._virtual_time + lead * state.weight / weight
        state.weight = weight

    def leave(self, flow: Flow) -> tuple[ChunkKey, ...]:
        """Remove a flow. Return the chunks that leave the queue because no flow wants them."""
        gone: list[ChunkKey] = []
        for _, key in self._states.pop(flow).heap:
            if key in self._queued and not self._waiters.flows_of(key):
                del self._queued[key]
                gone.append(key)
        return tuple(gone)

    def add(self, key: ChunkKey, nbytes: int) -> None:
        """Queue a chunk that some flow wants."""
        assert key not in self._queued
        wanted = self._waiters.flows_of(key)
        assert wanted
        self._queued[key] = nbytes
        for flow, position in wanted.items():
            heappush(self._states[flow].heap, (position, key))

    def remove(self, key: ChunkKey) -> None:
        """Remove a queued chunk."""
        del self._queued[key]

    def peek(self) -> tuple[ChunkKey, int] | None:
        """Return the chunk that `start_next` would start now, and its queued bytes; None if the queue is empty."""
        chosen = self._choose()
        return None if chosen is None else (chosen[1], self._queued[chosen[1]])

    def start_next(self, nbytes: int | None = None) -> ChunkKey:
        """Start `nbytes` (default: all) of the next chunk, charged to the version whose turn it was. The part runs
        until `end_part`. The chunk is no longer queued.
        """
        chosen = self._choose()
        assert chosen is not None
        state, key = chosen
        start_tag = self._start_tag(state)
        self._running.setdefault(key, deque()).append(max(self._virtual_time, start_tag))
        queued = self._queued.pop(key)
        state.finish_tag = start_tag + (queued if nbytes is None else nbytes) / state.weight
        self._virtual_time = self._lowest_running_tag()
        return key

    def end_part(self, key: ChunkKey) -> None:
        """End a running part of the chunk, read or not. The part that began first counts as ended."""
        tags = self._running[key]
        tags.popleft()
        if not tags:
            del self._running[key]
        # A waiting chunk may not start in its place yet. Virtual time must not pass that chunk's tag, so that it stays
        # as far behind as before.
        waiting = self._choose()
        limit = math.inf if waiting is None else max(self._virtual_time, self._start_tag(waiting[0]))
        self._virtual_time = min(self._lowest_running_tag(), limit)

    def check_integrity(self) -> None:
        """Raise AssertionError if two facts contradict each other."""
        lowest_tags = (min(tags) for tags in self._running.values())
        assert all(tag >= self._virtual_time for tag in lowest_tags), "virtual time never goes back"
        for key in self._queued:
            wanted = self._waiters.flows_of(key)
            assert wanted, "a chunk that no flow wants is not queued"
            assert all((position, key) in self._states[flow].heap for flow, position in wanted.items())

    def _lowest_running_tag(self) -> float:
        return min((tag for tags in self._running.values() for tag in tags), default=self._virtual_time)

    def _choose(self) -> tuple[_FlowState, ChunkKey] | None:
        heads = [(state, key) for state in self._states.values() if (key := self._first_queued(state)) is not None]
        return min(heads, key=lambda head: (self._start_tag(head[0]), head[0].arrival_number), default=None)

    def _start_tag(self, state: _FlowState) -> float:
        """Return the tag of the flow's next part."""
        return max(self._virtual_time - MAX_CREDIT_BYTES, state.finish_tag)

    def _first_queued(self, state: _FlowState) -> ChunkKey | None:
        """Return the flow's first queued chunk, or None."""
        while state.heap:
            key = state.heap[0][1]
            if key in self._queued:
                return key
            heappop(state.heap)
        return None
