"""The order in which a full queue sheds its requests. Pure state; `shed_decision.py` decides when to shed.

1. Batch requests.
2. Other requests of a tenant that is over its share of the queue.
3. Standard requests.
4. Interactive requests of tenants within their share.

Among equals, the newest request of the tenant that holds most is first (longest queue drop: Suter et al., INFOCOM
1998). A tenant's holding is its dominant share (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011): the largest of
its fractions of requests, bytes and tokens, divided by its weight.

Batch and standard requests each have a reserved share of the queue, equal to their share of the slots
(`RESERVED_SHARES`). Requests within it are skipped, and the next class in the order is shed. So some of them always
wait, and `tenant_fair_queue.py` serves them: no class starves because of the others. The reserve counts whole requests,
so a queue with few places reserves none.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, Protocol, TypeVar

from activator.queue.policy.queue_bounds import QueueLimit, QueueUsage, QueueUsageByTenant
from activator.queue.policy.queued_request import WEIGHTS, PriorityClass, QueuedRequest

GRACE: Final = 1.25  # a tenant may exceed its share by a quarter; otherwise equal tenants would alternate


_ALL: Final = sum(WEIGHTS.values())


class ShedClass(IntEnum):
    """The shed order, first to last. A tenant over its share is over with all its requests except batch."""

    BATCH = 0
    OVER = 1
    STANDARD = 2
    INTERACTIVE = 3


_SHED_CLASSES: Final = tuple(ShedClass)  # iterating the enum itself is several times slower
RESERVED_SHARES: Final[Mapping[ShedClass, float]] = {  # fraction of the limit; interactive gets the rest
    ShedClass.BATCH: WEIGHTS[PriorityClass.BATCH] / _ALL,
    ShedClass.STANDARD: WEIGHTS[PriorityClass.STANDARD] / _ALL,
}


class _Queued(Protocol):
    @property
    def queued_request(self) -> QueuedRequest: ...


P = TypeVar("P", bound=_Queued)


def shed_class_of(queued_request: QueuedRequest) -> ShedClass:
    """Return the class of a request whose tenant is within its share."""
    match queued_request.priority_class:
        case PriorityClass.BATCH:
            return ShedClass.BATCH
        case PriorityClass.STANDARD:
            return ShedClass.STANDARD
        case PriorityClass.INTERACTIVE:
            return ShedClass.INTERACTIVE


@dataclass(slots=True)
class LazyMaxHeap:
    """Max-heap of tenants with lazy decrease, applied when a tenant reaches the top. O(log n), amortised."""

    _heap: list[tuple[float, str]] = field(default_factory=list)  # negative heights, some outdated
    _upper_bounds: dict[str, float] = field(default_factory=dict)  # never below the current height

    def raise_to(self, tenant: str, height: float) -> None:
        """Record that the tenant's height is at least `height`."""
        if height > self._upper_bounds.get(tenant, -1.0):
            self._upper_bounds[tenant] = height
            heappush(self._heap, (-height, tenant))
            if len(self._heap) > 2 * len(self._upper_bounds) + 16:
                self._heap = [(-bound, each) for each, bound in self._upper_bounds.items()]
                heapify(self._heap)

    def drop(self, tenant: str) -> None:
        """Remove a tenant that has no more requests."""
        del self._upper_bounds[tenant]
        if not self._upper_bounds:
            self._heap.clear()

    def top(self, height_of: Callable[[str], float]) -> str | None:
        """Return the highest tenant, the first by name among equals, or None if the heap is empty."""
        while self._heap:
            negative_height, tenant = self._heap[0]
            if self._upper_bounds.get(tenant) != -negative_height:
                heappop(self._heap)
            elif (height := height_of(tenant)) == -negative_height:
                return tenant
            else:
                self._upper_bounds[tenant] = height
                heapreplace(self._heap, (-height, tenant))
        return None


@dataclass(slots=True)
class _Tenant(Generic[P]):
    """One tenant's waiting requests by shed class, newest last."""

    weight: int
    requests_by_class: dict[ShedClass, dict[P, None]] = field(default_factory=dict)
    usage_by_class: dict[ShedClass, QueueUsage] = field(
        default_factory=lambda: {shed_class: QueueUsage() for shed_class in RESERVED_SHARES}
    )


@dataclass(slots=True)
class ShedOrder(Generic[P]):
    """Waiting requests in the order in which a full queue sheds them. O(log n), except `check_integrity`."""

    bound: QueueLimit
    usage_by_tenant: QueueUsageByTenant = field(default_factory=QueueUsageByTenant)
    _tenants: dict[str, _Tenant[P]] = field(default_factory=dict)
    _total_weight: int = 0  # sum of all tenants' weights
    _heaps: dict[ShedClass, LazyMaxHeap] = field(
        default_factory=lambda: {shed_class: LazyMaxHeap() for shed_class in ShedClass}
    )
    _usage_by_class: dict[ShedClass, QueueUsage] = field(
        default_factory=lambda: {shed_class: QueueUsage() for shed_class in RESERVED_SHARES}
    )

    def add(self, place: P) -> None:
        """Add a request as the newest."""
        queued_request = place.queued_request
        self.usage_by_tenant.add(queued_request)
        tenant = self._tenants.get(queued_request.tenant)
        if tenant is None:
            tenant = self._tenants[queued_request.tenant] = _Tenant(queued_request.weight)
            self._total_weight += queued_request.weight
        elif tenant.weight != queued_request.weight:  # the weight has changed meanwhile
            self._total_weight += queued_request.weight - tenant.weight
            tenant.weight = queued_request.weight
        shed_class = shed_class_of(queued_request)
        tenant.requests_by_class.setdefault(shed_class, {})[place] = None
        if shed_class in RESERVED_SHARES:
            tenant.usage_by_class[shed_class].add(queued_request)
            self._usage_by_class[shed_class].add(queued_request)
        share = self._share(queued_request.tenant)
        for each in tenant.requests_by_class:
            self._heaps[each].raise_to(queued_request.tenant, share)

    def remove(self, place: P) -> None:
        """Remove a request that no longer waits."""
        queued_request, shed_class = place.queued_request, shed_class_of(place.queued_request)
        self.usage_by_tenant.remove(queued_request)
        tenant = self._tenants[queued_request.tenant]
        del tenant.requests_by_class[shed_class][place]
        if shed_class in RESERVED_SHARES:
            tenant.usage_by_class[shed_class].remove(queued_request)
            self._usage_by_class[shed_class].remove(queued_request)
        if not tenant.requests_by_class[shed_class]:
            del tenant.requests_by_class[shed_class]
            self._heaps[shed_class].drop(queued_request.tenant)
        if not tenant.requests_by_class:
            del self._tenants[queued_request.tenant]
            self._total_weight -= tenant.weight

    def next_to_shed(self, newest_tenant: str) -> tuple[ShedClass, P]:
        """Return the request to shed first, and its class. The queue is not empty. `newest_tenant` loses ties between
        tenants.
        """
        protected = _protected_classes(self._usage_by_class, self.bound)
        tops = {
            shed_class: top
            for shed_class in _SHED_CLASSES
            if (top := self._heaps[shed_class].top(self._share)) is not None
        }
        tops = {shed_class: top for shed_class, top in tops.items() if shed_class not in protected} or tops
        first = min(tops)
        if first is not ShedClass.BATCH:
            over = min(tops.values(), key=lambda tenant: (-self._share(tenant), tenant))
            if self._share(over) > GRACE * _filled(self.usage_by_tenant.total, self.bound) / self._total_weight:
                last = self._newest_tenant_of(over, newest_tenant)
                open_classes = self._tenants[last].requests_by_class.keys() & tops.keys()
                if not open_classes:
                    last, open_classes = over, self._tenants[over].requests_by_class.keys() & tops.keys()
                return ShedClass.OVER, _newest(self._tenants[last].requests_by_class[min(open_classes)])
        tenant = self._newest_tenant_of(tops[first], newest_tenant)
        if first not in self._tenants[tenant].requests_by_class:
            tenant = tops[first]
        return first, _newest(self._tenants[tenant].requests_by_class[first])

    def next_to_shed_of_tenant(self, tenant: str, bound: QueueLimit) -> tuple[ShedClass, P]:
        """Return which of the tenant's requests to shed first. `bound` limits this tenant alone."""
        own = self._tenants[tenant]
        protected = _protected_classes(own.usage_by_class, bound)
        shed_class = min(
            [shed_class for shed_class in own.requests_by_class if shed_class not in protected] or own.requests_by_class
        )
        return shed_class, _newest(own.requests_by_class[shed_class])

    def check_integrity(self) -> None:
        """Assert that usage matches the requests, that nothing is empty, and that heap heights are upper bounds."""
        self.usage_by_tenant.check_integrity()
        assert self._total_weight == sum(tenant.weight for tenant in self._tenants.values())
        for shed_class, load in self._usage_by_class.items():
            assert load == _sum(tenant.requests_by_class.get(shed_class, {}) for tenant in self._tenants.values())
        for name, tenant in self._tenants.items():
            assert all(
                load == _sum([tenant.requests_by_class.get(shed_class, {})])
                for shed_class, load in tenant.usage_by_class.items()
            )
            places = [place for shed_class in tenant.requests_by_class.values() for place in shed_class]
            assert self.usage_by_tenant.usage_of(name) == _sum([places])
            assert all(tenant.requests_by_class.values())
            assert all(
                self._share(name) <= self._heaps[shed_class]._upper_bounds[name]
                for shed_class in tenant.requests_by_class
            )
        for shed_class, heap in self._heaps.items():
            assert set(heap._upper_bounds) == {
                name for name, tenant in self._tenants.items() if shed_class in tenant.requests_by_class
            }

    def _newest_tenant_of(self, tenant: str, other: str) -> str:
        return other if other in self._tenants and self._share(other) == self._share(tenant) else tenant

    def _share(self, tenant: str) -> float:
        """Return what the tenant holds of the queue, divided by its weight."""
        return _filled(self.usage_by_tenant.usage_of(tenant), self.bound) / self._tenants[tenant].weight


def _filled(load: QueueUsage, bound: QueueLimit) -> float:
    """Return the largest used fraction of requests, bytes and tokens."""
    return max(load.entries / bound.entries, load.nbytes / bound.nbytes, load.tokens / bound.tokens)


def _protected_classes(usage_by_class: Mapping[ShedClass, QueueUsage], bound: QueueLimit) -> list[ShedClass]:
    """Return the classes that use no more than their reserved share."""
    return [
        shed_class for shed_class, part in RESERVED_SHARES.items() if _filled(usage_by_class[shed_class], bound) <= part
    ]


def _sum(places: Iterable[Iterable[P]]) -> QueueUsage:
    requests = [place.queued_request for each in places for place in each]
    return QueueUsage(
        len(requests),
        sum(queued_request.nbytes for queued_request in requests),
        sum(queued_request.tokens for queued_request in requests),
    )


def _newest(places: dict[P, None]) -> P:
    """Return the last key. Popped and put back: looking at a dict's end walks over all entries deleted there."""
    place, _ = places.popitem()
    places[place] = None
    return place
