"""Who waits in a queue, and who of them is shed first where it is full. Pure state; `shed` says when.

The order, of which the first goes first: batch; what a tenant has over its share of the queue; standard; interactive
of tenants within their share. Among equals it is the newest of the tenant that holds most (longest queue drop: Suter et
al., INFOCOM 1998). What a tenant holds is its dominant share (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011):
of requests, bytes and tokens that of which it fills most, over its weight.

Batch and standard keep a part of the queue, as large as their part of the slots (`RESERVED_SHARES`): what waits of them
within that is passed over, and who is next in the order goes. So whatever comes, some of them wait, and `fair` serves
who waits: none of a rank starves because of the others. The part of a queue is of whole requests: one of few places
keeps none for them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, Protocol, TypeVar

from activator.queue.policy.queue_bounds import QueueLimit, QueueUsage, QueueUsageByTenant
from activator.queue.policy.queued_request import WEIGHTS, PriorityClass, QueuedRequest

GRACE: Final = 1.25  # times its share are not over it: else equal tenants would take turns at being over


_ALL: Final = sum(WEIGHTS.values())


class ShedClass(IntEnum):
    """The order. A tenant that is over its share is so with all that it has but batch."""

    BATCH = 0
    OVER = 1
    STANDARD = 2
    INTERACTIVE = 3


_TIERS: Final = tuple(ShedClass)  # to walk over the enumeration itself takes some times as long
RESERVED_SHARES: Final[Mapping[ShedClass, float]] = {  # of the bound; interactive has what is left
    ShedClass.BATCH: WEIGHTS[PriorityClass.BATCH] / _ALL,
    ShedClass.STANDARD: WEIGHTS[PriorityClass.STANDARD] / _ALL,
}


class _Asked(Protocol):
    """One who waits."""

    @property
    def queued_request(self) -> QueuedRequest: ...


P = TypeVar("P", bound=_Asked)


def shed_class_of(queued_request: QueuedRequest) -> ShedClass:
    """Of one whose tenant is within its share."""
    match queued_request.priority_class:
        case PriorityClass.BATCH:
            return ShedClass.BATCH
        case PriorityClass.STANDARD:
            return ShedClass.STANDARD
        case PriorityClass.INTERACTIVE:
            return ShedClass.INTERACTIVE


@dataclass(slots=True)
class LazyMaxHeap:
    """Tenants by height, of whom the tallest is found in logarithmic time: who has shrunk is put right when it is on
    top, so that only growing beyond what was said before costs anything.
    """

    _heap: list[tuple[float, str]] = field(default_factory=list)  # negative heights, some of the past
    _upper_bounds: dict[str, float] = field(default_factory=dict)  # never less than it is

    def raise_to(self, tenant: str, height: float) -> None:
        """It is so tall now, or was already."""
        if height > self._upper_bounds.get(tenant, -1.0):
            self._upper_bounds[tenant] = height
            heappush(self._heap, (-height, tenant))
            if len(self._heap) > 2 * len(self._upper_bounds) + 16:
                self._heap = [(-said, each) for each, said in self._upper_bounds.items()]
                heapify(self._heap)

    def drop(self, tenant: str) -> None:
        """It is not here any more."""
        del self._upper_bounds[tenant]
        if not self._upper_bounds:
            self._heap.clear()

    def top(self, height_of: Callable[[str], float]) -> str | None:
        """The first by name of the tallest; None where nobody is."""
        while self._heap:
            below, tenant = self._heap[0]
            if self._upper_bounds.get(tenant) != -below:
                heappop(self._heap)
            elif (height := height_of(tenant)) == -below:
                return tenant
            else:
                self._upper_bounds[tenant] = height
                heapreplace(self._heap, (-height, tenant))
        return None


@dataclass(slots=True)
class _Tenant(Generic[P]):
    """What waits of one, by tier; the newest is the last."""

    weight: int
    tiers: dict[ShedClass, dict[P, None]] = field(default_factory=dict)
    loads: dict[ShedClass, QueueUsage] = field(
        default_factory=lambda: {shed_class: QueueUsage() for shed_class in RESERVED_SHARES}
    )


@dataclass(slots=True)
class ShedOrder(Generic[P]):
    """Those who wait in a queue of that bound. All but `check_integrity` takes logarithmic time."""

    bound: QueueLimit
    loads: QueueUsageByTenant = field(default_factory=QueueUsageByTenant)
    _tenants: dict[str, _Tenant[P]] = field(default_factory=dict)
    _weights: int = 0  # of them all
    _heaps: dict[ShedClass, LazyMaxHeap] = field(
        default_factory=lambda: {shed_class: LazyMaxHeap() for shed_class in ShedClass}
    )
    _tiers: dict[ShedClass, QueueUsage] = field(
        default_factory=lambda: {shed_class: QueueUsage() for shed_class in RESERVED_SHARES}
    )

    def add(self, place: P) -> None:
        """It waits, and is the newest."""
        queued_request = place.queued_request
        self.loads.add(queued_request)
        tenant = self._tenants.get(queued_request.tenant)
        if tenant is None:
            tenant = self._tenants[queued_request.tenant] = _Tenant(queued_request.weight)
            self._weights += queued_request.weight
        elif tenant.weight != queued_request.weight:  # it was changed meanwhile
            self._weights += queued_request.weight - tenant.weight
            tenant.weight = queued_request.weight
        shed_class = shed_class_of(queued_request)
        tenant.tiers.setdefault(shed_class, {})[place] = None
        if shed_class in RESERVED_SHARES:
            tenant.loads[shed_class].add(queued_request)
            self._tiers[shed_class].add(queued_request)
        share = self._share(queued_request.tenant)
        for each in tenant.tiers:
            self._heaps[each].raise_to(queued_request.tenant, share)

    def remove(self, place: P) -> None:
        """It waits no more."""
        queued_request, shed_class = place.queued_request, shed_class_of(place.queued_request)
        self.loads.remove(queued_request)
        tenant = self._tenants[queued_request.tenant]
        del tenant.tiers[shed_class][place]
        if shed_class in RESERVED_SHARES:
            tenant.loads[shed_class].remove(queued_request)
            self._tiers[shed_class].remove(queued_request)
        if not tenant.tiers[shed_class]:
            del tenant.tiers[shed_class]
            self._heaps[shed_class].drop(queued_request.tenant)
        if not tenant.tiers:
            del self._tenants[queued_request.tenant]
            self._weights -= tenant.weight

    def next_to_shed(self, came_last: str) -> tuple[ShedClass, P]:
        """Who is shed first, and why; of tenants that hold the same the one that came last. There is somebody."""
        kept = _kept(self._tiers, self.bound)
        tops = {
            shed_class: top for shed_class in _TIERS if (top := self._heaps[shed_class].top(self._share)) is not None
        }
        tops = {shed_class: top for shed_class, top in tops.items() if shed_class not in kept} or tops
        first = min(tops)
        if first is not ShedClass.BATCH:
            over = min(tops.values(), key=lambda tenant: (-self._share(tenant), tenant))
            if self._share(over) > GRACE * _filled(self.loads.in_all, self.bound) / self._weights:
                last = self._newest_tenant_of(over, came_last)
                open_tiers = self._tenants[last].tiers.keys() & tops.keys()
                if not open_tiers:
                    last, open_tiers = over, self._tenants[over].tiers.keys() & tops.keys()
                return ShedClass.OVER, _newest(self._tenants[last].tiers[min(open_tiers)])
        tenant = self._newest_tenant_of(tops[first], came_last)
        if first not in self._tenants[tenant].tiers:
            tenant = tops[first]
        return first, _newest(self._tenants[tenant].tiers[first])

    def next_to_shed_of_tenant(self, tenant: str, bound: QueueLimit) -> tuple[ShedClass, P]:
        """Who of the tenant's is shed first, where only its own count, in a queue of that bound."""
        own = self._tenants[tenant]
        kept = _kept(own.loads, bound)
        shed_class = min([shed_class for shed_class in own.tiers if shed_class not in kept] or own.tiers)
        return shed_class, _newest(own.tiers[shed_class])

    def check_integrity(self) -> None:
        """Loads are who waits; nothing is empty; nobody is taller than was said."""
        self.loads.check_integrity()
        assert self._weights == sum(tenant.weight for tenant in self._tenants.values())
        for shed_class, load in self._tiers.items():
            assert load == _sum(tenant.tiers.get(shed_class, {}) for tenant in self._tenants.values())
        for name, tenant in self._tenants.items():
            assert all(load == _sum([tenant.tiers.get(shed_class, {})]) for shed_class, load in tenant.loads.items())
            places = [place for shed_class in tenant.tiers.values() for place in shed_class]
            assert self.loads.of(name) == _sum([places])
            assert all(tenant.tiers.values())
            assert all(self._share(name) <= self._heaps[shed_class]._upper_bounds[name] for shed_class in tenant.tiers)
        for shed_class, tallest in self._heaps.items():
            assert set(tallest._upper_bounds) == {
                name for name, tenant in self._tenants.items() if shed_class in tenant.tiers
            }

    def _newest_tenant_of(self, tenant: str, other: str) -> str:
        return other if other in self._tenants and self._share(other) == self._share(tenant) else tenant

    def _share(self, tenant: str) -> float:
        """What it holds of the queue, for its weight."""
        return _filled(self.loads.of(tenant), self.bound) / self._tenants[tenant].weight


def _filled(load: QueueUsage, bound: QueueLimit) -> float:
    """The part of the bound that is taken, of what most is taken of."""
    return max(load.entries / bound.entries, load.nbytes / bound.nbytes, load.tokens / bound.tokens)


def _kept(tiers: Mapping[ShedClass, QueueUsage], bound: QueueLimit) -> list[ShedClass]:
    """Those of whom no more waits than may stay whatever comes."""
    return [shed_class for shed_class, part in RESERVED_SHARES.items() if _filled(tiers[shed_class], bound) <= part]


def _sum(places: Iterable[Iterable[P]]) -> QueueUsage:
    asks = [place.queued_request for each in places for place in each]
    return QueueUsage(
        len(asks),
        sum(queued_request.nbytes for queued_request in asks),
        sum(queued_request.tokens for queued_request in asks),
    )


def _newest(places: dict[P, None]) -> P:
    """The last one. Taken and put back: a look at the end of a dictionary walks over all that were deleted there."""
    place, _ = places.popitem()
    places[place] = None
    return place
