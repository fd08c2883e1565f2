"""One version's replicas, and the requests that wait for their slots. `throttler.py`, `slot_allocator.py`,
`replica_tracker.py`, `load_shedding.py` and `circuit_breakers.py` write it, on one event loop.
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
    """A replica as this activator knows it. `appeared_us` is when its feed row arrived, `wake_sent_us` when its version
    was woken, both monotonic microseconds.
    """

    row: ReplicaRow
    appeared_us: int
    wake_sent_us: int | None
    running: int = 0
    owner_running: int = 0  # of `running`, requests of the version's owner
    breaker: CircuitBreaker | None = None  # from a failure until the next answer begins
    credit: ReplicaCredit = field(default_factory=ReplicaCredit)
    slots_share: int | None = None  # streams for this activator; None: all
    max_requests: int | None = None  # requests allowed there now; None: no limit besides its streams
    wanted_slots: int = 1  # requests this activator would send; the next request tells the replica
    is_preferred: bool = True  # see `queue/policy/replica_subsets.py`
    gone: bool = False

    @property
    def slots(self) -> int:
        """Streams for this activator. A pause after a refusal lowers `max_requests`, not this."""
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
        """Set `slots_share` and `max_requests` by the replica's credit. Return when to review again. This activator is
        one of `members` and has `running` requests there.
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
        """Whether it takes a request if it has a free slot."""
        return not (self.is_closed or (self.breaker is not None and self.breaker.has_trial_request))

    @property
    def is_closed(self) -> bool:
        """Whether it takes no new requests, even with free slots."""
        return self.gone or self.row.draining or (self.breaker is not None and self.breaker.is_open)


@dataclass(slots=True, eq=False)
class Waiter:
    # A failure is set as a result. As an exception it would keep the waiting frames alive, in a reference cycle.
    assignment: "asyncio.Future[Replica | Failure]"
    enqueued_at_s: float
    until_s: float  # end of its wait, monotonic


@dataclass(slots=True)
class VersionQueue:
    """One version: its replicas and its waiting requests."""

    waiting: FairQueue[Waiter]
    shares: SlotShares  # slots reserved for its owner
    replicas: dict[str, Replica] = field(default_factory=dict)
    ring: HashRing = field(default_factory=HashRing)  # of all replicas
    throughput: Throughput = field(default_factory=Throughput)
    grant_at_s: float = inf  # when a grant is scheduled: a new window of `shares`, a change of a credit
    grant_timer: asyncio.TimerHandle | None = None
    last_sweep_s: float = 0.0  # time of the last sweep for late requests
    subset: ReplicaSubset = field(default_factory=ReplicaSubset)
    next_review_s: float = -inf  # when to review the limits of its replicas

    @property
    def free(self) -> int:
        free = 0  # a plain loop, because each request calls this several times
        for replica in self.replicas.values():
            free += replica.free
        return free

    @property
    def slots(self) -> int:
        """Slots of replicas that take requests, taken or free."""
        return sum(0 if replica.is_closed else replica.slots for replica in self.replicas.values())

    @property
    def is_asleep(self) -> bool:
        for replica in self.replicas.values():  # noqa: SIM110
            if not replica.is_closed:
                return False
        return True

    @property
    def awaits_start(self) -> bool:
        """Whether no replica will take requests again, even after its breaker closes."""
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
    """Return the next waiter of a tenant that may have a slot, or None. Skips cancelled waiters: their futures end at
    once, but they leave the queue a moment later.
    """
    while (
        found := version_queue.waiting.take() if may_take is None else version_queue.waiting.take(may_take)
    ) is not None:
        waiter, queued_request = found
        if not waiter.assignment.done():
            return waiter, queued_request
        version_queue.waiting.settle(queued_request, 0)
    return None
