"""Decide which waiting chunk a source reads next: fair queueing by version and weight, not first come, first served.

Pure. Start-time fair queueing with many concurrent requests (SFQ(D): Goyal, Vin and Cheng, 1996; MSF-SFQ(D): Jin, Chase
and Kaur, 2004). A part of a version's chunk is tagged with the virtual time at which its share allows it to start. The
lowest tag is next. While two versions wait, the bytes that each got, divided by its weight, differ by at most one part
of each.

Virtual time is the lowest tag of running parts. A new version starts there, as if it had been waiting when those parts
began. So the first version of a burst, whose chunks took all slots, waits until the others have had as many.
"""

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
Key = tuple[str, str]  # tenant, digest

_NOBODY: Final[Mapping[Flow, int]] = MappingProxyType({})


class WaiterIndex:
    """The chunks of each flow, and the flows of each chunk. All sources share one index."""

    def __init__(self) -> None:
        self._by_flow: dict[Flow, Mapping[Key, int]] = {}
        self._by_key: dict[Key, dict[Flow, int]] = {}

    def __repr__(self) -> str:
        return f"<WaiterIndex flows={len(self._by_flow)} chunks={len(self._by_key)}>"

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._by_flow

    def enter(self, flow: Flow, wanted: Mapping[Key, int]) -> None:
        """Let the flow wait for these chunks, in the order of their positions, until `leave`."""
        assert flow not in self._by_flow
        self._by_flow[flow] = wanted
        for key, position in wanted.items():
            self._by_key.setdefault(key, {})[flow] = position

    def leave(self, flow: Flow) -> None:
        """End the flow's waiting."""
        for key in self._by_flow.pop(flow):
            flows = self._by_key[key]
            del flows[flow]
            if not flows:
                del self._by_key[key]

    def chunks_of(self, flow: Flow) -> Mapping[Key, int]:
        """Return the flow's positions by chunk."""
        return self._by_flow[flow]

    def flows_of(self, key: Key) -> Mapping[Flow, int]:
        """Return the chunk's positions by flow; empty if no flow wants it."""
        return self._by_key.get(key, _NOBODY)


def by_position(digests: Iterable[str], tenant: str) -> dict[Key, int]:
    """Return the position of each chunk in its version's linear space."""
    return {(tenant, digest): position for position, digest in enumerate(digests)}


class ReadLimit(Protocol):
    """A limit of concurrent reads of a source."""

    def part(self, parts: int, nbytes: int, left: int) -> int | None:
        """Return how many of a chunk's remaining `left` bytes may start now; None: none now. `parts` parts with
        `nbytes` together are running. If there are none, some bytes must be allowed.
        """


@dataclass(frozen=True, slots=True)
class ChunkCountLimit:
    """A `ReadLimit` of `at_once` chunks of any length, each in one part."""

    at_once: int

    def part(self, parts: int, nbytes: int, left: int) -> int | None:
        """Return `left`, or None if too many chunks are running."""
        return left if parts < self.at_once else None


@dataclass(slots=True)
class _FlowState:
    weight: float
    entered: int  # arrival order, which breaks ties of tags
    finish: float = 0.0  # the tag at which its next part may start
    order: list[tuple[int, Key]] = field(default_factory=list)  # a heap; entries that are no longer queued are skipped


class FairReadQueue:
    """Chunks that wait for one source, or for their next part. Flows must enter and leave `wants` first.

    A chunk may be wanted by several versions; the first whose turn comes pays for it. Within a version, chunks come in
    the order of its linear space, in which a model needs them. Of versions with equal tags, the earlier one is first.
    """

    def __init__(self, wants: WaiterIndex) -> None:
        self._wants = wants
        self._now = 0.0  # virtual time, in bytes per weight; no running part ever had a lower tag
        self._running: dict[Key, deque[float]] = {}  # tags of its running parts, in order of start
        self._shares: dict[Flow, _FlowState] = {}
        self._queued: dict[Key, int] = {}  # remaining bytes
        self._entered = 0

    def __repr__(self) -> str:
        return f"<FairReadQueue flows={len(self._shares)} queued={len(self._queued)}>"

    def __len__(self) -> int:
        return len(self._queued)

    def enter(self, flow: Flow, weight: float = FULL_WEIGHT) -> None:
        """Add a flow with this weight, relative to other flows. Its share begins now, even if it queues a little later.
        Bandwidth that other flows used before is not made up for.
        """
        assert weight > 0
        assert flow not in self._shares
        share = self._shares[flow] = _FlowState(weight, self._entered, self._now)
        self._entered += 1
        for key, position in self._wants.chunks_of(flow).items():
            if key in self._queued:
                heappush(share.order, (position, key))

    def set_weight(self, flow: Flow, weight: float) -> None:
        """Change the flow's weight. Its lead over virtual time is scaled to the new weight."""
        assert weight > 0
        share = self._shares[flow]
        share.finish = self._now + max(0.0, share.finish - self._now) * share.weight / weight
        share.weight = weight

    def leave(self, flow: Flow) -> tuple[Key, ...]:
        """Remove a flow. Return the chunks that leave the queue because no flow wants them."""
        gone: list[Key] = []
        for _, key in self._shares.pop(flow).order:
            if key in self._queued and not self._wants.flows_of(key):
                del self._queued[key]
                gone.append(key)
        return tuple(gone)

    def add(self, key: Key, nbytes: int) -> None:
        """Queue a chunk that some flow wants."""
        assert key not in self._queued
        wanted = self._wants.flows_of(key)
        assert wanted
        self._queued[key] = nbytes
        for flow, position in wanted.items():
            heappush(self._shares[flow].order, (position, key))

    def remove(self, key: Key) -> None:
        """Remove a queued chunk."""
        del self._queued[key]

    def next(self) -> tuple[Key, int] | None:
        """Return the chunk that `take` would start now, and its queued bytes; None if the queue is empty."""
        chosen = self._choose()
        return None if chosen is None else (chosen[1], self._queued[chosen[1]])

    def take(self, nbytes: int | None = None) -> Key:
        """Start `nbytes` (default: all) of the next chunk, charged to the version whose turn it was. The part runs
        until `end`. The chunk is no longer queued.
        """
        chosen = self._choose()
        assert chosen is not None
        share, key = chosen
        start = self._start(share)
        self._running.setdefault(key, deque()).append(max(self._now, start))
        queued = self._queued.pop(key)
        share.finish = start + (queued if nbytes is None else nbytes) / share.weight
        self._now = self._lowest()
        return key

    def end(self, key: Key) -> None:
        """End a running part of the chunk, read or not. The part that began first counts as ended."""
        tags = self._running[key]
        tags.popleft()
        if not tags:
            del self._running[key]
        # A waiting chunk may not start in its place yet. Virtual time must not pass that chunk's tag, so that it stays
        # as far behind as before.
        waiting = self._choose()
        self._now = self._lowest() if waiting is None else min(self._lowest(), max(self._now, self._start(waiting[0])))

    def check_integrity(self) -> None:
        """Raise AssertionError if two facts contradict each other."""
        assert all(tag >= self._now for tags in self._running.values() for tag in tags), "virtual time never goes back"
        for key in self._queued:
            wanted = self._wants.flows_of(key)
            assert wanted, "a chunk that no flow wants is not queued"
            assert all((position, key) in self._shares[flow].order for flow, position in wanted.items())

    def _lowest(self) -> float:
        return min((tag for tags in self._running.values() for tag in tags), default=self._now)

    def _choose(self) -> tuple[_FlowState, Key] | None:
        heads = [(share, key) for share in self._shares.values() if (key := self._head(share)) is not None]
        return min(heads, key=lambda head: (self._start(head[0]), head[0].entered), default=None)

    def _start(self, share: _FlowState) -> float:
        """Return the tag of the flow's next part."""
        return max(self._now - MAX_CREDIT_BYTES, share.finish)

    def _head(self, share: _FlowState) -> Key | None:
        """Return the flow's first queued chunk, or None."""
        while share.order:
            key = share.order[0][1]
            if key in self._queued:
                return key
            heappop(share.order)
        return None
