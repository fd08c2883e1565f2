"""Whose chunk a source is asked for next: by shares over the versions that are waited for, not by who came first. Pure.

Start-time fair queueing with many requests under way (SFQ(D): Goyal, Vin and Cheng, 1996; Jin, Chase and Kaur, 2004). A
version's chunk is tagged with the virtual time at which its share allows it to start; the lowest tag is next. Of two
versions that wait, neither is ahead by more than a chunk for each, over their weights.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

Flow = Hashable  # one who waits for a version, for as long as they wait
Key = tuple[str, str]  # tenant, digest

FULL_WEIGHT: Final = 1.0  # of what somebody waits for
LOW_WEIGHT: Final = 1 / 16  # of what nobody waits for yet


@dataclass(frozen=True, slots=True)
class Limit:
    """A source has `at_once` slots. A chunk takes one for each `slot_bytes` of its length; None: one, however long."""

    at_once: int
    slot_bytes: int | None = None

    def slots(self, nbytes: int) -> int:
        """That a chunk of `nbytes` takes; never more than there are."""
        if self.slot_bytes is None:
            return 1
        return min(self.at_once, max(1, -(-nbytes // self.slot_bytes)))


@dataclass(slots=True)
class _Share:
    weight: float
    entered: int  # who came first, where tags are equal
    finish: float = 0.0  # the tag at which its next chunk may start
    order: list[tuple[int, Key]] = field(default_factory=list)  # a heap; what is not queued any more is skipped


@dataclass(slots=True)
class _Queued:
    nbytes: int
    flows: set[Flow]


class Sharing:
    """Chunks that wait for one source. Each is wanted by one version or more; the first whose turn comes pays for it.

    Within a version chunks come in the order of its linear space, which is the order in which a model needs them.
    Between versions with equal tags, the one that was asked for first is first.
    """

    def __init__(self) -> None:
        self._now = 0.0  # virtual: bytes per weight; the tag of what was started last
        self._shares: dict[Flow, _Share] = {}
        self._queued: dict[Key, _Queued] = {}
        self._entered = 0

    def __repr__(self) -> str:
        return f"<Sharing flows={len(self._shares)} queued={len(self._queued)}>"

    def __len__(self) -> int:
        return len(self._queued)

    def enter(self, flow: Flow, weight: float = FULL_WEIGHT) -> None:
        """It gets `weight` parts beside what others have, from now on: nothing is made up for."""
        assert weight > 0
        assert flow not in self._shares
        self._shares[flow] = _Share(weight, self._entered, self._now)
        self._entered += 1

    def weigh(self, flow: Flow, weight: float) -> None:
        """Change its weight; what it is ahead by counts by the new one."""
        assert weight > 0
        share = self._shares[flow]
        share.finish = self._now + max(0.0, share.finish - self._now) * share.weight / weight
        share.weight = weight

    def leave(self, flow: Flow) -> tuple[Key, ...]:
        """Nobody waits there any more. Returns the chunks that are not queued any more, as nobody wants them."""
        gone: list[Key] = []
        for _, key in self._shares.pop(flow).order:
            if (queued := self._queued.get(key)) is not None:
                queued.flows.discard(flow)
                if not queued.flows:
                    del self._queued[key]
                    gone.append(key)
        return tuple(gone)

    def add(self, key: Key, nbytes: int, wanted: Mapping[Flow, int]) -> None:
        """Queue a chunk that these versions want, each at a position of its own."""
        assert key not in self._queued
        assert wanted
        self._queued[key] = _Queued(nbytes, set(wanted))
        for flow, position in wanted.items():
            heappush(self._shares[flow].order, (position, key))

    def want(self, key: Key, flow: Flow, position: int) -> None:
        """One more wants it, if it is still queued."""
        if (queued := self._queued.get(key)) is not None:
            queued.flows.add(flow)
            heappush(self._shares[flow].order, (position, key))

    def remove(self, key: Key) -> None:
        """It is not asked for after all."""
        del self._queued[key]

    def next(self) -> Key | None:
        """What `take` would start now."""
        chosen = self._choose()
        return None if chosen is None else chosen[1]

    def take(self) -> Key:
        """Start the next chunk, at the cost of the version whose turn it was."""
        chosen = self._choose()
        assert chosen is not None
        share, key = chosen
        self._now = max(self._now, share.finish)
        share.finish = self._now + self._queued.pop(key).nbytes / share.weight
        return key

    def check_integrity(self) -> None:
        """Raises AssertionError where two facts contradict each other."""
        for key, queued in self._queued.items():
            assert queued.flows, "what nobody wants is not queued"
            assert all(key in {each for _, each in self._shares[flow].order} for flow in queued.flows)

    def _choose(self) -> tuple[_Share, Key] | None:
        heads = [(share, key) for flow, share in self._shares.items() if (key := self._head(flow, share)) is not None]
        return min(heads, key=lambda head: (max(self._now, head[0].finish), head[0].entered), default=None)

    def _head(self, flow: Flow, share: _Share) -> Key | None:
        """The version's first chunk that is queued."""
        while share.order:
            key = share.order[0][1]
            if (queued := self._queued.get(key)) is not None and flow in queued.flows:
                return key
            heappop(share.order)
        return None


def by_position(digests: Iterable[str], tenant: str) -> dict[Key, int]:
    """Chunks in the order of their version's linear space, by that order."""
    return {(tenant, digest): position for position, digest in enumerate(digests)}
