"""The fair queue of a version's waiting requests, in tokens. Pure state.

Slots are shared fairly between priority classes, and within a class between tenants. For each tenant, the request with
the earliest deadline is next.

Implements virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) on two levels:
the one that was charged least is next. The estimate is charged with the slot, and corrected when the slot comes back. A
tenant that returns gains no advantage over waiting ones: its counter starts where the last served one began, as in
start-time fair queueing (Goyal et al., SIGCOMM 1996). So of two tenants that both wait, neither is more than two of
their largest requests ahead. A waiting class gets at least its weight's share, so lower classes do not starve. A tenant
of twice the weight gets twice as much.
"""

from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from activator.queue.policy.queue_bounds import UNBOUNDED, QueueLimit, QueueUsage
from activator.queue.policy.queued_request import WEIGHTS, PriorityClass, QueuedRequest
from activator.queue.policy.shed_order import ShedOrder

T = TypeVar("T")
K = TypeVar("K")

FINEST: Final = 16  # buckets per second; deadlines in the same bucket do not count as earlier
LEVELS: Final = 4  # the coarsest bucket is 256 s; deadlines are not days away, so there are few of those
# Bound on counters, which are kept after a tenant's last request. Else leaving and returning would reset its charge.
MAX_COUNTERS: Final = 4096


def _levels() -> tuple[dict[int, int], ...]:
    return tuple({} for _ in range(LEVELS))


@dataclass(slots=True)
class DeadlineIndex:
    """Tokens by deadline: how many tokens have an earlier deadline than a given one, without looking at each request.

    A 16-ary tree: sums per 1/16 s, 1 s, 16 s and 256 s. Deadlines are seconds on any clock. The time of adding and
    reading does not depend on how many requests wait.
    """

    _sums: tuple[dict[int, int], ...] = field(default_factory=_levels)

    def add(self, deadline_s: float, tokens: int) -> None:
        """Add tokens at a deadline; negative `tokens` subtract."""
        index = int(deadline_s * FINEST)
        for sums in self._sums:
            left = sums.get(index, 0) + tokens
            if left:
                sums[index] = left
            else:
                sums.pop(index, None)
            index >>= 4

    def before(self, deadline_s: float) -> int:
        """Return the tokens with an earlier deadline. May be too low by one bucket, never too high."""
        index, found = int(deadline_s * FINEST), 0
        for sums in self._sums[:-1]:
            for each in range(index & ~15, index) if sums else ():
                found += sums.get(each, 0)
            index >>= 4
        return found + sum(tokens for each, tokens in self._sums[-1].items() if each < index)

    def total(self) -> int:
        """Return the sum of all tokens."""
        return sum(self._sums[-1].values())


def _admit_all(_: str) -> bool:
    return True


@dataclass(slots=True)
class VirtualCounters(Generic[K]):
    """Virtual token counters: what each key has been charged."""

    _counters: dict[K, float] = field(default_factory=dict)  # most recently joined last
    _floor: float = 0.0  # counter of the last served key, before its charge

    def counter_of(self, key: K) -> float:
        """Return the counter of `key`."""
        return self._counters.get(key, self._floor)

    def join(self, key: K) -> None:
        """Raise the counter of a key that begins to wait to the floor."""
        self._counters[key] = max(self._counters.pop(key, 0.0), self._floor)
        if len(self._counters) > MAX_COUNTERS:
            del self._counters[next(iter(self._counters))]

    def charge_immediate(self, key: K, amount: float) -> None:
        """Charge a key that is served without waiting: `join` and `charge` in one step."""
        began = self._counters.pop(key, 0.0)
        if began > self._floor:
            self._floor = began
        else:
            began = self._floor
        self._counters[key] = began + amount
        if len(self._counters) > MAX_COUNTERS:
            del self._counters[next(iter(self._counters))]

    def charge(self, key: K, amount: float) -> None:
        """Charge a key that is served."""
        began = self.counter_of(key)
        self._floor = max(self._floor, began)
        self._counters[key] = began + amount

    def correct(self, key: K, amount: float) -> None:
        """Add the difference between actual and estimated cost."""
        if key in self._counters:
            self._counters[key] += amount


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    """The place of a waiting request. `arrival` is its number in that queue."""

    entry: T
    queued_request: QueuedRequest
    deadline_s: float
    arrival: int
    queue: "FairQueue[T]"
    left: bool = False


@dataclass(slots=True)
class _Backlog(Generic[T]):
    """Waiting requests of one tenant in one priority class. Entries that have left are skipped when popped."""

    heap: list[tuple[float, int, int, QueueEntry[T]]] = field(default_factory=list)  # by deadline, then by arrival
    waiting: int = 0
    pushed: int = 0  # tells a re-added entry from its old item in the heap
    deadline_index: DeadlineIndex = field(default_factory=DeadlineIndex)

    def push(self, place: QueueEntry[T]) -> None:
        self.waiting += 1
        self.pushed += 1
        heappush(self.heap, (place.deadline_s, place.arrival, self.pushed, place))
        self.deadline_index.add(place.deadline_s, cost(place.queued_request.tokens))

    def pop(self) -> QueueEntry[T]:
        while (place := heappop(self.heap)[-1]).left:
            pass
        self._subtract(place)
        return place

    def forget(self, place: QueueEntry[T]) -> None:
        place.left = True
        self._subtract(place)
        if len(self.heap) > 2 * self.waiting + 16:
            self.heap = [item for item in self.heap if not item[-1].left]
            heapify(self.heap)

    def _subtract(self, place: QueueEntry[T]) -> None:
        self.waiting -= 1
        self.deadline_index.add(place.deadline_s, -cost(place.queued_request.tokens))


@dataclass(slots=True)
class _PriorityLane(Generic[T]):
    """One priority class: its waiting tenants and their counters."""

    tenants: dict[str, _Backlog[T]] = field(default_factory=dict)  # waiting tenants
    counters: VirtualCounters[str] = field(default_factory=VirtualCounters)


@dataclass(slots=True)
class FairQueue(Generic[T]):
    """A fair queue of entries with their requests. `admission.py` and `shed_decision.py` decide whether one fits. `put`
    and `discard` take logarithmic time. `take` also takes time linear in the tenants waiting for this version.
    """

    shared_shed_order: ShedOrder[QueueEntry[T]]  # of all queues together
    bound: InitVar[QueueLimit] = UNBOUNDED
    shed_order: ShedOrder[QueueEntry[T]] = field(init=False)
    _places: dict[T, QueueEntry[T]] = field(default_factory=dict)
    _priority_lanes: dict[PriorityClass, _PriorityLane[T]] = field(init=False)
    _counters: VirtualCounters[PriorityClass] = field(default_factory=VirtualCounters)
    _arrivals: int = 0

    def __post_init__(self, bound: QueueLimit) -> None:
        self.shed_order = ShedOrder(bound)
        self._priority_lanes = {priority_class: _PriorityLane() for priority_class in PriorityClass}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def queue_usage(self) -> QueueUsage:
        """Usage of this queue. Read it at once; it changes later."""
        return self.shed_order.usage_by_tenant.total

    def put(self, entry: T, queued_request: QueuedRequest, deadline_s: float) -> None:
        """Add an entry. It must not be waiting already."""
        assert entry not in self._places
        self._arrivals += 1
        self._insert(QueueEntry(entry, queued_request, deadline_s, self._arrivals, self))

    def put_first(self, entry: T, queued_request: QueuedRequest, deadline_s: float) -> None:
        """Put back an entry that `take` returned and that was not served, and undo its charge. It comes before all
        others of its tenant, class and deadline.
        """
        assert entry not in self._places
        self._counters.correct(
            queued_request.priority_class, -cost(queued_request.tokens) / WEIGHTS[queued_request.priority_class]
        )
        self._priority_lanes[queued_request.priority_class].counters.correct(
            queued_request.tenant, -cost(queued_request.tokens) / queued_request.weight
        )
        self._insert(QueueEntry(entry, queued_request, deadline_s, 0, self))

    def put_back(self, place: QueueEntry[T]) -> None:
        """Put a discarded entry back at its former place. For shedding it counts as the newest."""
        self._insert(QueueEntry(place.entry, place.queued_request, place.deadline_s, place.arrival, self))

    def take(self, may_take: Callable[[str], bool] = _admit_all) -> tuple[T, QueuedRequest] | None:
        """Remove and return the next entry of a tenant that `may_take` admits, and charge its tenant and class. Return
        None if no such tenant waits.
        """
        open_to = {
            priority_class: [name for name in lane.tenants if may_take(name)]
            for priority_class, lane in self._priority_lanes.items()
        }
        priority_class = min(
            (priority_class for priority_class, tenants in open_to.items() if tenants),
            key=self._counters.counter_of,
            default=None,
        )
        if priority_class is None:
            return None
        lane = self._priority_lanes[priority_class]
        tenant = min(open_to[priority_class], key=lane.counters.counter_of)
        place = lane.tenants[tenant].pop()
        self._charge(place.queued_request)
        self._remove_entry(place)
        return place.entry, place.queued_request

    def waiting_of(self, tenant: str) -> int:
        """Return how many requests of the tenant wait."""
        return self.shed_order.usage_by_tenant.usage_of(tenant).entries

    def weight_of(self, tenant: str) -> int:
        """Return the weight of a tenant that has requests in the queue."""
        backlogs = (lane.tenants.get(tenant) for lane in self._priority_lanes.values())
        return next(backlog.heap[0][-1].queued_request.weight for backlog in backlogs if backlog is not None)

    def tenants(self) -> set[str]:
        """Return the tenants that have requests in the queue."""
        return {tenant for lane in self._priority_lanes.values() for tenant in lane.tenants}

    def tokens_before(self, queued_request: QueuedRequest, deadline_s: float) -> int:
        """Return the tokens that are certainly served first: those of its tenant and class with an earlier deadline.
        This is a lower bound: requests of other tenants are served in between.
        """
        backlog = self._priority_lanes[queued_request.priority_class].tenants.get(queued_request.tenant)
        return 0 if backlog is None else backlog.deadline_index.before(deadline_s)

    def entries_by_backlog(self) -> Iterator[list[QueueEntry[T]]]:
        """Yield the entries of each tenant and class, in the order of their deadlines."""
        for lane in self._priority_lanes.values():
            for backlog in lane.tenants.values():
                yield [place for *_, place in sorted(backlog.heap) if not place.left]

    def tokens_of(self, tenant: str, priority_class: PriorityClass) -> int:
        """Return the queued tokens of a tenant in this class and more urgent ones."""
        backlogs = (lane.tenants.get(tenant) for each, lane in self._priority_lanes.items() if each >= priority_class)
        return sum(backlog.deadline_index.total() for backlog in backlogs if backlog is not None)

    def charge_immediate(self, queued_request: QueuedRequest) -> None:
        """Charge a request that gets its slot without waiting, because no waiting request may have that slot."""
        tokens = cost(queued_request.tokens)
        self._counters.charge_immediate(queued_request.priority_class, tokens / WEIGHTS[queued_request.priority_class])
        self._priority_lanes[queued_request.priority_class].counters.charge_immediate(
            queued_request.tenant, tokens / queued_request.weight
        )

    def settle(self, queued_request: QueuedRequest, tokens: int) -> None:
        """Correct the charge of a request that had a slot: it took `tokens` instead of its estimate. A refused or
        cancelled request took 0 tokens, which cost as much as one.
        """
        more = cost(tokens) - cost(queued_request.tokens)
        self._counters.correct(queued_request.priority_class, more / WEIGHTS[queued_request.priority_class])
        self._priority_lanes[queued_request.priority_class].counters.correct(
            queued_request.tenant, more / queued_request.weight
        )

    def discard(self, entry: T) -> bool:
        """Remove an entry. Return whether it was waiting."""
        place = self._places.get(entry)
        if place is None:
            return False
        self._priority_lanes[place.queued_request.priority_class].tenants[place.queued_request.tenant].forget(place)
        self._remove_entry(place)
        return True

    def check_integrity(self) -> None:
        """Assert that usage matches the entries, that each entry is in one backlog, and that no backlog is empty."""
        assert len(self._places) == self.queue_usage.entries
        backlogs = [backlog for lane in self._priority_lanes.values() for backlog in lane.tenants.values()]
        standing = [item[-1].entry for backlog in backlogs for item in backlog.heap if not item[-1].left]
        assert sorted(map(id, standing)) == sorted(map(id, self._places))
        assert all(backlog.waiting > 0 for backlog in backlogs)
        assert sum(backlog.waiting for backlog in backlogs) == len(self._places)
        self.shed_order.check_integrity()
        self.shared_shed_order.check_integrity()

    def _insert(self, place: QueueEntry[T]) -> None:
        self._places[place.entry] = place
        self._join(place.queued_request).push(place)
        self.shed_order.add(place)
        self.shared_shed_order.add(place)

    def _join(self, queued_request: QueuedRequest) -> _Backlog[T]:
        lane = self._priority_lanes[queued_request.priority_class]
        if not lane.tenants:
            self._counters.join(queued_request.priority_class)
        backlog = lane.tenants.get(queued_request.tenant)
        if backlog is None:
            lane.counters.join(queued_request.tenant)
            backlog = lane.tenants[queued_request.tenant] = _Backlog()
        return backlog

    def _charge(self, queued_request: QueuedRequest) -> None:
        self._counters.charge(
            queued_request.priority_class, cost(queued_request.tokens) / WEIGHTS[queued_request.priority_class]
        )
        self._priority_lanes[queued_request.priority_class].counters.charge(
            queued_request.tenant, cost(queued_request.tokens) / queued_request.weight
        )

    def _remove_entry(self, place: QueueEntry[T]) -> None:
        queued_request = place.queued_request
        del self._places[place.entry]
        tenants = self._priority_lanes[queued_request.priority_class].tenants
        if not tenants[queued_request.tenant].waiting:
            del tenants[queued_request.tenant]
        self.shed_order.remove(place)
        self.shared_shed_order.remove(place)


def cost(tokens: int) -> int:
    """Return the tokens to charge. A request without tokens, such as a prediction, counts as one."""
    return tokens if tokens > 0 else 1
