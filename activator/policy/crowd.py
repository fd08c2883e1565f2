"""Who waits in a queue, and who of them is shed first where it is full. Pure state; `shed` says when.

The order, of which the first goes first: batch; what a tenant has over its share of the queue; standard; interactive
of tenants within their share. Among equals it is the newest of the tenant that holds most (longest queue drop: Suter et
al., INFOCOM 1998). What a tenant holds is its dominant share (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011):
of requests, bytes and tokens that of which it fills most, over its weight.

Batch and standard keep a part of the queue, as large as their part of the slots (`KEPT`): what waits of them within
that is passed over, and who is next in the order goes. So whatever comes, some of them wait, and `fair` serves who
waits: none of a rank starves because of the others. The part of a queue is of whole requests: one of few places keeps
none for them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, Protocol, TypeVar

from activator.policy.ask import WEIGHTS, Ask, Rank
from activator.policy.bounds import Bound, Load, Loads

GRACE: Final = 1.25  # times its share are not over it: else equal tenants would take turns at being over


_ALL: Final = sum(WEIGHTS.values())


class Tier(IntEnum):
    """The order. A tenant that is over its share is so with all that it has but batch."""

    BATCH = 0
    OVER = 1
    STANDARD = 2
    INTERACTIVE = 3


_TIERS: Final = tuple(Tier)  # to walk over the enumeration itself takes some times as long
KEPT: Final[Mapping[Tier, float]] = {  # of the bound; interactive has what is left
    Tier.BATCH: WEIGHTS[Rank.BATCH] / _ALL,
    Tier.STANDARD: WEIGHTS[Rank.STANDARD] / _ALL,
}


class _Asked(Protocol):
    """One who waits."""

    @property
    def ask(self) -> Ask: ...


P = TypeVar("P", bound=_Asked)


def tier_of(ask: Ask) -> Tier:
    """Of one whose tenant is within its share."""
    match ask.rank:
        case Rank.BATCH:
            return Tier.BATCH
        case Rank.STANDARD:
            return Tier.STANDARD
        case Rank.INTERACTIVE:
            return Tier.INTERACTIVE


@dataclass(slots=True)
class Tallest:
    """Tenants by height, of whom the tallest is found in logarithmic time: who has shrunk is put right when it is on
    top, so that only growing beyond what was said before costs anything.
    """

    _heap: list[tuple[float, str]] = field(default_factory=list)  # negative heights, some of the past
    _said: dict[str, float] = field(default_factory=dict)  # never less than it is

    def rise(self, tenant: str, height: float) -> None:
        """It is so tall now, or was already."""
        if height > self._said.get(tenant, -1.0):
            self._said[tenant] = height
            heappush(self._heap, (-height, tenant))
            if len(self._heap) > 2 * len(self._said) + 16:
                self._heap = [(-said, each) for each, said in self._said.items()]
                heapify(self._heap)

    def drop(self, tenant: str) -> None:
        """It is not here any more."""
        del self._said[tenant]
        if not self._said:
            self._heap.clear()

    def top(self, height_of: Callable[[str], float]) -> str | None:
        """The first by name of the tallest; None where nobody is."""
        while self._heap:
            below, tenant = self._heap[0]
            if self._said.get(tenant) != -below:
                heappop(self._heap)
            elif (height := height_of(tenant)) == -below:
                return tenant
            else:
                self._said[tenant] = height
                heapreplace(self._heap, (-height, tenant))
        return None


@dataclass(slots=True)
class _Tenant(Generic[P]):
    """What waits of one, by tier; the newest is the last."""

    weight: int
    tiers: dict[Tier, dict[P, None]] = field(default_factory=dict)
    loads: dict[Tier, Load] = field(default_factory=lambda: {tier: Load() for tier in KEPT})


@dataclass(slots=True)
class Crowd(Generic[P]):
    """Those who wait in a queue of that bound. All but `check_integrity` takes logarithmic time."""

    bound: Bound
    loads: Loads = field(default_factory=Loads)
    _tenants: dict[str, _Tenant[P]] = field(default_factory=dict)
    _weights: int = 0  # of them all
    _tallest: dict[Tier, Tallest] = field(default_factory=lambda: {tier: Tallest() for tier in Tier})
    _tiers: dict[Tier, Load] = field(default_factory=lambda: {tier: Load() for tier in KEPT})

    def add(self, place: P) -> None:
        """It waits, and is the newest."""
        ask = place.ask
        self.loads.add(ask)
        tenant = self._tenants.get(ask.tenant)
        if tenant is None:
            tenant = self._tenants[ask.tenant] = _Tenant(ask.weight)
            self._weights += ask.weight
        elif tenant.weight != ask.weight:  # it was changed meanwhile
            self._weights += ask.weight - tenant.weight
            tenant.weight = ask.weight
        tier = tier_of(ask)
        tenant.tiers.setdefault(tier, {})[place] = None
        if tier in KEPT:
            tenant.loads[tier].add(ask)
            self._tiers[tier].add(ask)
        share = self._share(ask.tenant)
        for each in tenant.tiers:
            self._tallest[each].rise(ask.tenant, share)

    def remove(self, place: P) -> None:
        """It waits no more."""
        ask, tier = place.ask, tier_of(place.ask)
        self.loads.remove(ask)
        tenant = self._tenants[ask.tenant]
        del tenant.tiers[tier][place]
        if tier in KEPT:
            tenant.loads[tier].remove(ask)
            self._tiers[tier].remove(ask)
        if not tenant.tiers[tier]:
            del tenant.tiers[tier]
            self._tallest[tier].drop(ask.tenant)
        if not tenant.tiers:
            del self._tenants[ask.tenant]
            self._weights -= tenant.weight

    def lowest(self, came_last: str) -> tuple[Tier, P]:
        """Who is shed first, and why; of tenants that hold the same the one that came last. There is somebody."""
        kept = _kept(self._tiers, self.bound)
        tops = {tier: top for tier in _TIERS if (top := self._tallest[tier].top(self._share)) is not None}
        tops = {tier: top for tier, top in tops.items() if tier not in kept} or tops
        first = min(tops)
        if first is not Tier.BATCH:
            over = min(tops.values(), key=lambda tenant: (-self._share(tenant), tenant))
            if self._share(over) > GRACE * _filled(self.loads.in_all, self.bound) / self._weights:
                last = self._last_of(over, came_last)
                open_tiers = self._tenants[last].tiers.keys() & tops.keys()
                if not open_tiers:
                    last, open_tiers = over, self._tenants[over].tiers.keys() & tops.keys()
                return Tier.OVER, _newest(self._tenants[last].tiers[min(open_tiers)])
        tenant = self._last_of(tops[first], came_last)
        if first not in self._tenants[tenant].tiers:
            tenant = tops[first]
        return first, _newest(self._tenants[tenant].tiers[first])

    def lowest_of(self, tenant: str, bound: Bound) -> tuple[Tier, P]:
        """Who of the tenant's is shed first, where only its own count, in a queue of that bound."""
        own = self._tenants[tenant]
        kept = _kept(own.loads, bound)
        tier = min([tier for tier in own.tiers if tier not in kept] or own.tiers)
        return tier, _newest(own.tiers[tier])

    def check_integrity(self) -> None:
        """Loads are who waits; nothing is empty; nobody is taller than was said."""
        self.loads.check_integrity()
        assert self._weights == sum(tenant.weight for tenant in self._tenants.values())
        for tier, load in self._tiers.items():
            assert load == _sum(tenant.tiers.get(tier, {}) for tenant in self._tenants.values())
        for name, tenant in self._tenants.items():
            assert all(load == _sum([tenant.tiers.get(tier, {})]) for tier, load in tenant.loads.items())
            places = [place for tier in tenant.tiers.values() for place in tier]
            assert self.loads.of(name) == _sum([places])
            assert all(tenant.tiers.values())
            assert all(self._share(name) <= self._tallest[tier]._said[name] for tier in tenant.tiers)
        for tier, tallest in self._tallest.items():
            assert set(tallest._said) == {name for name, tenant in self._tenants.items() if tier in tenant.tiers}

    def _last_of(self, tenant: str, other: str) -> str:
        return other if other in self._tenants and self._share(other) == self._share(tenant) else tenant

    def _share(self, tenant: str) -> float:
        """What it holds of the queue, for its weight."""
        return _filled(self.loads.of(tenant), self.bound) / self._tenants[tenant].weight


def _filled(load: Load, bound: Bound) -> float:
    """The part of the bound that is taken, of what most is taken of."""
    return max(load.entries / bound.entries, load.nbytes / bound.nbytes, load.tokens / bound.tokens)


def _kept(tiers: Mapping[Tier, Load], bound: Bound) -> list[Tier]:
    """Those of whom no more waits than may stay whatever comes."""
    return [tier for tier, part in KEPT.items() if _filled(tiers[tier], bound) <= part]


def _sum(places: Iterable[Iterable[P]]) -> Load:
    asks = [place.ask for each in places for place in each]
    return Load(len(asks), sum(ask.nbytes for ask in asks), sum(ask.tokens for ask in asks))


def _newest(places: dict[P, None]) -> P:
    """The last one. Taken and put back: a look at the end of a dictionary walks over all that were deleted there."""
    place, _ = places.popitem()
    places[place] = None
    return place
