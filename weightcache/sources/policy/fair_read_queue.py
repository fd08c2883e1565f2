"""Who waits for which chunks, and whose chunk a source is asked for next: by shares, not by who came first.

Pure.

Start-time fair queueing with many requests under way (SFQ(D): Goyal, Vin and Cheng, 1996; MSF-SFQ(D): Jin, Chase and
Kaur, 2004). A part of a version's chunk is tagged with the virtual time at which its share allows it to start; the
lowest tag is next. Of two versions that wait, neither is ahead by more than a part for each, over their weights.
Virtual time is the lowest tag of what is under way: whoever comes now was as good as there when that began, so that the
first of a storm, whose chunks took all turns there were, waits until the others have as many.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final, Protocol

FULL_WEIGHT: Final = 1.0  # of what somebody waits for
PREFETCH_WEIGHT: Final = 1 / 16  # of what nobody waits for yet
MAX_CREDIT_BYTES: Final = (
    64 << 20
)  # over its weight, for who has entered and is kept from queueing: by memory, by a peer

Flow = Hashable  # one who waits for a version, for as long as they wait
Key = tuple[str, str]  # tenant, digest

_NOBODY: Final[Mapping[Flow, int]] = MappingProxyType({})


class WaiterIndex:
    """The chunks of a flow, and the flows of a chunk. The one account of it: every source's shares go by it."""

    def __init__(self) -> None:
        self._by_flow: dict[Flow, Mapping[Key, int]] = {}
        self._by_key: dict[Key, dict[Flow, int]] = {}

    def __repr__(self) -> str:
        return f"<Wants flows={len(self._by_flow)} chunks={len(self._by_key)}>"

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._by_flow

    def enter(self, flow: Flow, wanted: Mapping[Key, int]) -> None:
        """It waits for these chunks, in the order of their positions, until `leave`."""
        assert flow not in self._by_flow
        self._by_flow[flow] = wanted
        for key, position in wanted.items():
            self._by_key.setdefault(key, {})[flow] = position

    def leave(self, flow: Flow) -> None:
        """It waits no more."""
        for key in self._by_flow.pop(flow):
            flows = self._by_key[key]
            del flows[flow]
            if not flows:
                del self._by_key[key]

    def chunks_of(self, flow: Flow) -> Mapping[Key, int]:
        """Positions by chunk."""
        return self._by_flow[flow]

    def flows_of(self, key: Key) -> Mapping[Flow, int]:
        """Positions by flow; empty where nobody wants it."""
        return self._by_key.get(key, _NOBODY)


def by_position(digests: Iterable[str], tenant: str) -> dict[Key, int]:
    """Chunks in the order of their version's linear space, by that order."""
    return {(tenant, digest): position for position, digest in enumerate(digests)}


class ReadLimit(Protocol):
    """How much of a source may be under way."""

    def part(self, parts: int, nbytes: int, left: int) -> int | None:
        """How many bytes of a chunk may begin that lacks `left` yet, beside `parts` of chunks that have `nbytes`
        together; None: nothing now. Where nothing is under way, something may begin.
        """


@dataclass(frozen=True, slots=True)
class ChunkCountLimit:
    """A `ReadLimit` for so many chunks, however long, each in one part."""

    at_once: int

    def part(self, parts: int, nbytes: int, left: int) -> int | None:
        """See `ReadLimit`."""
        return left if parts < self.at_once else None


@dataclass(slots=True)
class _FlowState:
    weight: float
    entered: int  # who came first, where tags are equal
    finish: float = 0.0  # the tag at which its next chunk may start
    order: list[tuple[int, Key]] = field(default_factory=list)  # a heap; what is not queued any more is skipped


class FairReadQueue:
    """Chunks that wait for one source, or for it to go on. Each is wanted by one version or more; the first whose turn
    comes pays. By whom, `wants` says: a flow enters and leaves there first.

    Within a version chunks come in the order of its linear space, which is the order in which a model needs them.
    Between versions with equal tags, the one that was asked for first is first.
    """

    def __init__(self, wants: WaiterIndex) -> None:
        self._wants = wants
        self._now = 0.0  # virtual: bytes per weight; what was under way never had a lower tag
        self._running: dict[Key, deque[float]] = {}  # tags of its parts, as they began
        self._shares: dict[Flow, _FlowState] = {}
        self._queued: dict[Key, int] = {}  # bytes
        self._entered = 0

    def __repr__(self) -> str:
        return f"<Sharing flows={len(self._shares)} queued={len(self._queued)}>"

    def __len__(self) -> int:
        return len(self._queued)

    def enter(self, flow: Flow, weight: float = FULL_WEIGHT) -> None:
        """It gets `weight` parts beside what others have, from now on, also where it queues a little later. What was
        given away before is not made up for.
        """
        assert weight > 0
        assert flow not in self._shares
        share = self._shares[flow] = _FlowState(weight, self._entered, self._now)
        self._entered += 1
        for key, position in self._wants.chunks_of(flow).items():
            if key in self._queued:
                heappush(share.order, (position, key))

    def set_weight(self, flow: Flow, weight: float) -> None:
        """Change its weight; what it is ahead by counts by the new one."""
        assert weight > 0
        share = self._shares[flow]
        share.finish = self._now + max(0.0, share.finish - self._now) * share.weight / weight
        share.weight = weight

    def leave(self, flow: Flow) -> tuple[Key, ...]:
        """Nobody waits there any more. Returns the chunks that are not queued any more, as nobody wants them."""
        gone: list[Key] = []
        for _, key in self._shares.pop(flow).order:
            if key in self._queued and not self._wants.flows_of(key):
                del self._queued[key]
                gone.append(key)
        return tuple(gone)

    def add(self, key: Key, nbytes: int) -> None:
        """Queue a chunk that somebody wants."""
        assert key not in self._queued
        wanted = self._wants.flows_of(key)
        assert wanted
        self._queued[key] = nbytes
        for flow, position in wanted.items():
            heappush(self._shares[flow].order, (position, key))

    def remove(self, key: Key) -> None:
        """It is not asked for after all."""
        del self._queued[key]

    def next(self) -> tuple[Key, int] | None:
        """What `take` would start now, and how many bytes it was queued with."""
        chosen = self._choose()
        return None if chosen is None else (chosen[1], self._queued[chosen[1]])

    def take(self, nbytes: int | None = None) -> Key:
        """Start so many bytes (default: all) of the next chunk, at the cost of the version whose turn it was. They are
        under way until `end`; the chunk is not queued any more.
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
        """A part of it was read, or won't be: whichever it is, the one that began first counts."""
        tags = self._running[key]
        tags.popleft()
        if not tags:
            del self._running[key]
        # Nothing may begin in its place: who waits since before is as far behind as it was.
        waiting = self._choose()
        self._now = self._lowest() if waiting is None else min(self._lowest(), max(self._now, self._start(waiting[0])))

    def check_integrity(self) -> None:
        """Raises AssertionError where two facts contradict each other."""
        assert all(tag >= self._now for tags in self._running.values() for tag in tags), "virtual time never goes back"
        for key in self._queued:
            wanted = self._wants.flows_of(key)
            assert wanted, "what nobody wants is not queued"
            assert all((position, key) in self._shares[flow].order for flow, position in wanted.items())

    def _lowest(self) -> float:
        return min((tag for tags in self._running.values() for tag in tags), default=self._now)

    def _choose(self) -> tuple[_FlowState, Key] | None:
        heads = [(share, key) for share in self._shares.values() if (key := self._head(share)) is not None]
        return min(heads, key=lambda head: (self._start(head[0]), head[0].entered), default=None)

    def _start(self, share: _FlowState) -> float:
        """The tag of its next part."""
        return max(self._now - MAX_CREDIT_BYTES, share.finish)

    def _head(self, share: _FlowState) -> Key | None:
        """The version's first chunk that is queued."""
        while share.order:
            key = share.order[0][1]
            if key in self._queued:
                return key
            heappop(share.order)
        return None
