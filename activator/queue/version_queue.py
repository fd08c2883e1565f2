"""One version's replicas as the door sees them, and who waits for a slot of them.

Written by the parts of the throttler on one event loop: `slot_allocator.py`, `replica_tracker.py`, `load_shedding.py`,
`circuit_breakers.py`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from activator.queue.policy.circuit_breaker import CircuitBreaker
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.replica_credit import ReplicaCredit
from activator.queue.policy.replica_subsets import ReplicaSubset
from activator.queue.policy.slot_shares import SlotShares
from activator.queue.policy.tenant_fair_queue import FairQueue
from activator.queue.policy.wait_estimate import Throughput
from activator.routing.policy.affinity import HashRing
from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.control_messages import ReplicaRow


@dataclass(slots=True, eq=False)
class Replica:
    """A replica as the door sees it. Monotonic: `appeared_us`: its row came; `wake_sent_us`: it was asked for."""

    row: ReplicaRow
    appeared_us: int
    wake_sent_us: int | None
    running: int = 0
    owner_running: int = 0  # of these, requests of the version's owner
    breaker: CircuitBreaker | None = None  # since a request failed there, until an answer begins
    credit: ReplicaCredit = field(default_factory=ReplicaCredit)
    slots_share: int | None = None  # streams of the replica that are for this activator; None: all
    max_requests: int | None = None  # requests that this activator may have there now; None: all that the replica takes
    wanted_slots: int = 1  # requests that this activator would have there; the replica is told with the next one
    is_preferred: bool = True  # see `queue/policy/replica_subsets.py`
    gone: bool = False

    @property
    def slots(self) -> int:
        """Streams that are for this activator, also while the replica is full and is asked one request at a time."""
        return self.row.max_streams if self.slots_share is None else self.slots_share

    @property
    def free(self) -> int:
        """How many more requests this activator may send it now."""
        row = self.row
        free = (row.max_streams if self.max_requests is None else self.max_requests) - self.running
        if free < 0 or self.gone or row.draining:
            return 0
        return free if self.breaker is None else min(free, 1) if self.is_open else 0

    def review(self, members: int, running: int, now_s: float) -> float:
        """Decide `slots_share` and `most` by the replica's credit. This activator is one of `members` and has `running`
        requests there. Return when to decide again.
        """
        streams = self.row.max_streams
        slots_share, limit = (
            self.credit.credited_slots(streams, members, now_s),
            self.credit.limit(streams, members, running, now_s),
        )
        self.slots_share, self.max_requests = (
            (slots_share, limit) if min(slots_share, limit) < streams else (None, None)
        )
        return self.credit.next_change_s(now_s)

    @property
    def is_open(self) -> bool:
        """Whether it takes a request, but for those that it has."""
        return not (self.is_closed or (self.breaker is not None and self.breaker.is_trying))

    @property
    def is_closed(self) -> bool:
        """Whether it takes no new requests, busy or not."""
        return self.gone or self.row.draining or (self.breaker is not None and self.breaker.is_open)


@dataclass(slots=True, eq=False)
class Waiter:
    # A failure is a result, too: as an exception it would hold the frames that wait for it, and they it.
    assignment: "asyncio.Future[Replica | Failure]"
    enqueued_at_s: float
    until_s: float  # it waits no longer


@dataclass(slots=True)
class VersionQueue:
    """One version: its replicas and who waits for them."""

    waiting: FairQueue[Waiter]
    shares: SlotShares  # slots that are reserved for its owner
    replicas: dict[str, Replica] = field(default_factory=dict)
    ring: HashRing = field(default_factory=HashRing)  # of all of them
    throughput: Throughput = field(default_factory=Throughput)
    due_s: float = inf  # for when a grant is scheduled: a window of `shares` begins, a credit changes
    due: asyncio.TimerHandle | None = None
    swept_s: float = 0.0  # when it was last looked for those who are late
    subset: ReplicaSubset = field(default_factory=ReplicaSubset)
    review_s: float = -inf  # when to look again how many requests each replica may have

    @property
    def free(self) -> int:
        free = 0  # plain loops: each request comes by here some times
        for replica in self.replicas.values():
            free += replica.free
        return free

    @property
    def slots(self) -> int:
        """Of replicas that take requests, taken or free."""
        return sum(0 if replica.is_closed else replica.slots for replica in self.replicas.values())

    @property
    def is_asleep(self) -> bool:
        for replica in self.replicas.values():  # noqa: SIM110
            if not replica.is_closed:
                return False
        return True

    @property
    def awaits_start(self) -> bool:
        """Whether none of its replicas will take a request again, rested or not."""
        return all(replica.gone or replica.row.draining for replica in self.replicas.values())

    def may_take(self, tenant: str, weight: int) -> bool:
        """Return whether the tenant may have a free slot."""
        free = self.free
        if tenant == self.shares.owner:
            return free > 0
        return self.shares.may_take(tenant, weight, self.slots, free, self.throughput.running)


def next_waiter(
    version_queue: VersionQueue, may_take: Callable[[str], bool] | None = None
) -> tuple[Waiter, QueuedRequest] | None:
    """Return the next waiter of a tenant that may have a slot, or None.

    Skips cancelled waiters: their futures end at once, but they leave the queue a moment later.
    """
    while (
        found := version_queue.waiting.take() if may_take is None else version_queue.waiting.take(may_take)
    ) is not None:
        waiter, queued_request = found
        if not waiter.assignment.done():
            return waiter, queued_request
        version_queue.waiting.settle(queued_request, 0)
    return None
