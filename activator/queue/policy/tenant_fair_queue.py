"""Who waits for a version, and who of them is next: fair in tokens over ranks, and within a rank over tenants; of a
tenant the one whose deadline is the earliest. Pure state.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) on two levels: who was
given the least is next. The estimate is given with the slot, and corrected when the slot comes back. Who returns has
no more to claim than who waits: it begins where the last that was served began, as in start-time fair queueing (Goyal
et al., SIGCOMM 1996). So of two tenants that both wait, neither is more than two of their largest requests ahead; a
rank that waits gets at least its weight's share, which is what keeps a lower one from starving. A tenant of twice the
weight is given twice as much.
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

FINEST: Final = 16  # a second has so many; who has the same sixteenth is not before
LEVELS: Final = 4  # the coarsest is 256 s, of which there are few: a deadline is not days away
MAX_COUNTERS: Final = 4096  # tenants whose counters outlast their requests: who leaves and comes back sheds no debt


def _levels() -> tuple[dict[int, int], ...]:
    return tuple({} for _ in range(LEVELS))


@dataclass(slots=True)
class DeadlineIndex:
    """Tokens by the deadline of who asks for them: how many have less time than one, without a look at each.

    A tree of sixteen branches: sums by the sixteenth of a second, the second, sixteen seconds, and so on. Deadlines are
    seconds on any clock. Adding and asking take the same time however much waits.
    """

    _sums: tuple[dict[int, int], ...] = field(default_factory=_levels)

    def add(self, deadline_s: float, tokens: int) -> None:
        """So many more; fewer where that is below 0."""
        index = int(deadline_s * FINEST)
        for sums in self._sums:
            left = sums.get(index, 0) + tokens
            if left:
                sums[index] = left
            else:
                sums.pop(index, None)
            index >>= 4

    def before(self, deadline_s: float) -> int:
        """Tokens of those with less time, never more than there are."""
        index, found = int(deadline_s * FINEST), 0
        for sums in self._sums[:-1]:
            for each in range(index & ~15, index) if sums else ():
                found += sums.get(each, 0)
            index >>= 4
        return found + sum(tokens for each, tokens in self._sums[-1].items() if each < index)

    def total(self) -> int:
        """Tokens of all."""
        return sum(self._sums[-1].values())


def _admit_all(_: str) -> bool:
    return True


@dataclass(slots=True)
class VirtualCounters(Generic[K]):
    """What each was given."""

    _given: dict[K, float] = field(default_factory=dict)  # who joined last is last
    _floor: float = 0.0  # where the last that was served began

    def of(self, key: K) -> float:
        """Return what was given to `key` so far."""
        return self._given.get(key, self._floor)

    def join(self, key: K) -> None:
        """It begins to wait."""
        self._given[key] = max(self._given.pop(key, 0.0), self._floor)
        if len(self._given) > MAX_COUNTERS:
            del self._given[next(iter(self._given))]

    def charge_immediate(self, key: K, amount: float) -> None:
        """It is served without having waited: `join` and `give`, in one step."""
        began = self._given.pop(key, 0.0)
        if began > self._floor:
            self._floor = began
        else:
            began = self._floor
        self._given[key] = began + amount
        if len(self._given) > MAX_COUNTERS:
            del self._given[next(iter(self._given))]

    def give(self, key: K, amount: float) -> None:
        """It is served."""
        began = self.of(key)
        self._floor = max(self._floor, began)
        self._given[key] = began + amount

    def correct(self, key: K, amount: float) -> None:
        """It took so much more than it was given."""
        if key in self._given:
            self._given[key] += amount


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    """Where one waits. `arrival` is its number in that queue."""

    entry: T
    queued_request: QueuedRequest
    deadline_s: float
    arrival: int
    home: "FairQueue[T]"
    left: bool = False


@dataclass(slots=True)
class _Backlog(Generic[T]):
    """What waits of one tenant in one rank; who left is skipped when its turn comes."""

    heap: list[tuple[float, int, int, QueueEntry[T]]] = field(default_factory=list)  # by deadline, then by arrival
    waiting: int = 0
    pushed: int = 0  # tells an entry that was put back from the item that it left in the heap
    tally: DeadlineIndex = field(default_factory=DeadlineIndex)

    def push(self, place: QueueEntry[T]) -> None:
        self.waiting += 1
        self.pushed += 1
        heappush(self.heap, (place.deadline_s, place.arrival, self.pushed, place))
        self.tally.add(place.deadline_s, cost(place.queued_request.tokens))

    def pop(self) -> QueueEntry[T]:
        while (place := heappop(self.heap)[-1]).left:
            pass
        self._subtract(place)
        return place

    def forget(self, place: QueueEntry[T]) -> None:
        """It has left."""
        place.left = True
        self._subtract(place)
        if len(self.heap) > 2 * self.waiting + 16:
            self.heap = [item for item in self.heap if not item[-1].left]
            heapify(self.heap)

    def _subtract(self, place: QueueEntry[T]) -> None:
        self.waiting -= 1
        self.tally.add(place.deadline_s, -cost(place.queued_request.tokens))


@dataclass(slots=True)
class _PriorityLane(Generic[T]):
    """One rank: its tenants, and what they were given in it."""

    tenants: dict[str, _Backlog[T]] = field(default_factory=dict)  # those that wait
    given: VirtualCounters[str] = field(default_factory=VirtualCounters)


@dataclass(slots=True)
class FairQueue(Generic[T]):
    """Entries that wait, each with its ask; whether one fits is `admission`'s to say.

    `put` and `discard` take logarithmic time, `take` also time linear in the tenants that wait for this version.
    """

    shared_shed_order: ShedOrder[QueueEntry[T]]  # of all queues together
    bound: InitVar[QueueLimit] = UNBOUNDED
    shed_order: ShedOrder[QueueEntry[T]] = field(init=False)
    _places: dict[T, QueueEntry[T]] = field(default_factory=dict)
    _priority_lanes: dict[PriorityClass, _PriorityLane[T]] = field(init=False)
    _given: VirtualCounters[PriorityClass] = field(default_factory=VirtualCounters)
    _arrivals: int = 0

    def __post_init__(self, bound: QueueLimit) -> None:
        self.shed_order = ShedOrder(bound)
        self._priority_lanes = {priority_class: _PriorityLane() for priority_class in PriorityClass}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def queue_usage(self) -> QueueUsage:
        """What waits here; to be read, not kept."""
        return self.shed_order.loads.in_all

    def put(self, entry: T, queued_request: QueuedRequest, deadline_s: float) -> None:
        """An entry waits at most once."""
        assert entry not in self._places
        self._arrivals += 1
        self._insert(QueueEntry(entry, queued_request, deadline_s, self._arrivals, self))

    def put_first(self, entry: T, queued_request: QueuedRequest, deadline_s: float) -> None:
        """Put an entry back that `take` gave out and that was not served, and undo its charge. It comes before all
        others of its tenant, rank and deadline.
        """
        assert entry not in self._places
        self._given.correct(
            queued_request.priority_class, -cost(queued_request.tokens) / WEIGHTS[queued_request.priority_class]
        )
        self._priority_lanes[queued_request.priority_class].given.correct(
            queued_request.tenant, -cost(queued_request.tokens) / queued_request.weight
        )
        self._insert(QueueEntry(entry, queued_request, deadline_s, 0, self))

    def put_back(self, place: QueueEntry[T]) -> None:
        """Put a discarded entry back at its former place. For shedding it counts as the newest."""
        self._insert(QueueEntry(place.entry, place.queued_request, place.deadline_s, place.arrival, self))

    def take(self, may_take: Callable[[str], bool] = _admit_all) -> tuple[T, QueuedRequest] | None:
        """Take out the next entry of a tenant that `may_take` admits, and charge its tenant and rank. Return None if no
        such tenant waits.
        """
        open_to = {
            priority_class: [name for name in lane.tenants if may_take(name)]
            for priority_class, lane in self._priority_lanes.items()
        }
        priority_class = min(
            (priority_class for priority_class, tenants in open_to.items() if tenants), key=self._given.of, default=None
        )
        if priority_class is None:
            return None
        lane = self._priority_lanes[priority_class]
        tenant = min(open_to[priority_class], key=lane.given.of)
        place = lane.tenants[tenant].pop()
        self._charge(place.queued_request)
        self._remove_entry(place)
        return place.entry, place.queued_request

    def waiting_of(self, tenant: str) -> int:
        """Return how many requests of the tenant wait."""
        return self.shed_order.loads.of(tenant).entries

    def weight_of(self, tenant: str) -> int:
        """Return the weight of a tenant that has requests in the queue."""
        backlogs = (lane.tenants.get(tenant) for lane in self._priority_lanes.values())
        return next(backlog.heap[0][-1].queued_request.weight for backlog in backlogs if backlog is not None)

    def tenants(self) -> set[str]:
        """Return the tenants that have requests in the queue."""
        return {tenant for lane in self._priority_lanes.values() for tenant in lane.tenants}

    def tokens_before(self, queued_request: QueuedRequest, deadline_s: float) -> int:
        """Return the tokens that are certainly served first: those of its tenant and rank with an earlier deadline.

        This is the least: requests of other tenants are served in between.
        """
        backlog = self._priority_lanes[queued_request.priority_class].tenants.get(queued_request.tenant)
        return 0 if backlog is None else backlog.tally.before(deadline_s)

    def entries_by_backlog(self) -> Iterator[list[QueueEntry[T]]]:
        """Yield the places of each tenant and rank, in the order of their deadlines."""
        for lane in self._priority_lanes.values():
            for backlog in lane.tenants.values():
                yield [place for *_, place in sorted(backlog.heap) if not place.left]

    def tokens_of(self, tenant: str, priority_class: PriorityClass) -> int:
        """Return the queued tokens of a tenant at this rank or a more urgent one."""
        backlogs = (lane.tenants.get(tenant) for each, lane in self._priority_lanes.items() if each >= priority_class)
        return sum(backlog.tally.total() for backlog in backlogs if backlog is not None)

    def charge_immediate(self, queued_request: QueuedRequest) -> None:
        """Charge a request that gets its slot without waiting, because no waiting request may have that slot."""
        tokens = cost(queued_request.tokens)
        self._given.charge_immediate(queued_request.priority_class, tokens / WEIGHTS[queued_request.priority_class])
        self._priority_lanes[queued_request.priority_class].given.charge_immediate(
            queued_request.tenant, tokens / queued_request.weight
        )

    def settle(self, queued_request: QueuedRequest, tokens: int) -> None:
        """Correct the charge of a served request: it took `tokens`, not what was estimated."""
        more = cost(tokens) - cost(queued_request.tokens)
        self._given.correct(queued_request.priority_class, more / WEIGHTS[queued_request.priority_class])
        self._priority_lanes[queued_request.priority_class].given.correct(
            queued_request.tenant, more / queued_request.weight
        )

    def discard(self, entry: T) -> bool:
        """Take it out wherever it stands; whether it was waiting."""
        place = self._places.get(entry)
        if place is None:
            return False
        self._priority_lanes[place.queued_request.priority_class].tenants[place.queued_request.tenant].forget(place)
        self._remove_entry(place)
        return True

    def check_integrity(self) -> None:
        """Loads are what waits; each entry stands in one backlog; no backlog is empty."""
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
            self._given.join(queued_request.priority_class)
        backlog = lane.tenants.get(queued_request.tenant)
        if backlog is None:
            lane.given.join(queued_request.tenant)
            backlog = lane.tenants[queued_request.tenant] = _Backlog()
        return backlog

    def _charge(self, queued_request: QueuedRequest) -> None:
        self._given.give(
            queued_request.priority_class, cost(queued_request.tokens) / WEIGHTS[queued_request.priority_class]
        )
        self._priority_lanes[queued_request.priority_class].given.give(
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
    """What has no tokens, a prediction, counts as one."""
    return tokens if tokens > 0 else 1
