"""Give each request a slot at a replica of its version, at once or after a wait, or refuse it.

Decisions are elsewhere. `queue/policy/admission.py` decides whether a request may wait. `slot_allocator.py` decides
which request is next and which replica it gets. `replica_tracker.py` knows which replicas serve, `waker.py` wakes
versions, and `queue/policy/wait_estimate.py` estimates when a slot is free.
"""

import asyncio
import random
import time
from collections.abc import Callable

from activator.queue.circuit_breakers import INTEGRITY, LONGEST_S, ReplicaBreakers, VersionBreakers
from activator.queue.load_shedding import LoadShedder
from activator.queue.policy.admission import AdmissionFacts, Admit, Hold, QueueLimits, Shed, decide
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest
from activator.queue.policy.shed_decision import Reason, completion_time_s
from activator.queue.policy.wait_estimate import (
    StartForecasts,
    Throughput,
    WaitEstimate,
    is_too_late,
    redact_for_caller,
    wait_s,
)
from activator.queue.replica_tracker import ReplicaTracker
from activator.queue.slot_allocator import ALONE, ActivatorPeers, SlotAllocator
from activator.queue.version_queue import Replica, VersionQueue, Waiter
from activator.queue.waker import Waker
from activator.routing.policy.version_key import VersionKey, key_of
from activator.routing.policy.version_resolution import Availability
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Failure, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.traffic_errors import DeadlineExceeded, DeadlineTooShort, ReplicaLost


class NoSlotInTime(Exception):
    """No slot was free in time for a retry, and the request does not wait for a start."""


class Slot:
    """One request's slot at a replica. The holder sets `tokens` to what it took; None means as estimated."""

    __slots__ = (
        "_deadline", "_enqueued_at_s", "_key", "_queued_request", "_replica", "_retry_by_s", "_throttler", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        throttler: "Throttler",
        key: VersionKey,
        queued_request: QueuedRequest,
        deadline: Deadline,
        enqueued_at_s: float,
        retry_by_s: float | None = None,
        replica: Replica | None = None,
    ) -> None:
        self._throttler = throttler
        self._key = key
        self._queued_request = queued_request
        self._deadline = deadline
        self._enqueued_at_s = enqueued_at_s
        self._retry_by_s = retry_by_s
        self._replica = replica
        self.tokens: int | None = None

    @property
    def replica(self) -> Replica:
        """The replica, while the slot is held."""
        assert self._replica is not None
        return self._replica

    async def __aenter__(self) -> "Slot":
        self._replica = await self._throttler.acquire(self._key, self._queued_request, self._deadline, self._retry_by_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def requeue(self) -> None:
        """Give this slot back after its full replica refused the request, and wait for another slot. The request
        returns to its former place in the queue. Raises as entering does.
        """
        replica, self._replica, self.tokens = self.replica, None, None
        self._replica = await self._throttler.reacquire(
            self._key, replica, self._queued_request, self._deadline, self._enqueued_at_s, self._retry_by_s
        )

    def release(self) -> None:
        """Give the slot back. Idempotent."""
        replica, self._replica = self._replica, None
        if replica is not None:
            self._throttler.slot_allocator.release(self._key, replica, self._queued_request, self.tokens)

    def release_after(self, cancel_task: "asyncio.Task[None] | None") -> None:
        """Give the slot back once `cancel_task` is done (None: now). Another slot of the request settles the queue."""
        replica, self._replica = self._replica, None
        if replica is None:
            return
        if cancel_task is None:
            self._throttler.slot_allocator.give_back(self._key, replica, self._queued_request, 0)
        else:
            cancel_task.add_done_callback(
                lambda _: self._throttler.slot_allocator.give_back(self._key, replica, self._queued_request, 0)
            )


class Throttler:
    """Grants slots of all versions. `clock` returns monotonic seconds."""

    def __init__(
        self,
        limits: QueueLimits,
        waker: Waker,
        *,
        longest_open_s: float = LONGEST_S,
        peers: ActivatorPeers = ALONE,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[int], int] = random.randrange,
    ) -> None:
        self._limits = limits
        self._waker = waker
        self._clock = clock
        self._starts = StartForecasts()
        self.replica_breakers = ReplicaBreakers(longest_open_s, clock, self._reopen)
        self.version_breakers = VersionBreakers(longest_open_s)
        self.load_shedder = LoadShedder(limits)
        self.slot_allocator = SlotAllocator(limits, self.load_shedder, peers, clock, draw)
        self._version_queues = self.slot_allocator.version_queues
        self.usage_by_tenant = self.slot_allocator.usage_by_tenant
        self.full_refusals = 0  # requests that full replicas refused
        self._tracker = ReplicaTracker(self.slot_allocator, self._starts, self.version_breakers, waker, clock)

    def __repr__(self) -> str:
        return f"<Throttler {self.slot_allocator!r}>"

    def slot(
        self, key: VersionKey, queued_request: QueuedRequest, deadline: Deadline, retry_by_s: float | None = None
    ) -> Slot:
        """Return an `async with` block that holds a slot of some replica. Entering waits for the slot. Safe to cancel.

        Raises Refused with Overloaded, ShedByPriority, ShedByFairShare, DeadlineExceeded, DeadlineTooShort,
        BreakerOpen, or with the reason why a start failed. Raises NoSlotInTime if there was no slot by `retry_by_s`
        (monotonic), unless the request waits for a start.
        """
        return Slot(self, key, queued_request, deadline, self._clock(), retry_by_s)

    def try_take_slot_elsewhere(
        self, key: VersionKey, queued_request: QueuedRequest, deadline: Deadline, excluded_replica: Replica
    ) -> Slot | None:
        """Return a slot of another replica than `excluded_replica`, if one without failures is free now, else None. The
        caller must release the slot.
        """
        replica = self.slot_allocator.try_take_other_replica(key, queued_request, excluded_replica)
        return None if replica is None else Slot(self, key, queued_request, deadline, self._clock(), replica=replica)

    def has_several_replicas(self, key: VersionKey) -> bool:
        """Return whether the version has more than one replica."""
        version_queue = self._version_queues.get(key)
        return version_queue is not None and len(version_queue.replicas) > 1

    def is_asleep(self, key: VersionKey) -> bool:
        """Return whether no replica of the version takes requests."""
        version_queue = self._version_queues.get(key)
        return version_queue is None or version_queue.is_asleep

    def availability(self, key: VersionKey) -> Availability:
        """Return whether the version sleeps, has a free slot, or is full. Slots of other activators are not counted."""
        version_queue = self._version_queues.get(key)
        if version_queue is None or version_queue.is_asleep:
            return Availability.ASLEEP
        if self._clock() >= version_queue.next_review_s:  # a credit may have expired since the last request
            self.slot_allocator.grant(key, version_queue)
        return Availability.ROOM if version_queue.free and not len(version_queue.waiting) else Availability.FULL

    def estimate_queued_wait(self, key: VersionKey, queued_request: QueuedRequest, deadline: Deadline) -> WaitEstimate:
        """Return the estimate for a request that waits for a slot."""
        version_queue = self._version_queues.get(key)
        if version_queue is None or version_queue.is_asleep:
            return self._starts.wait_estimate(key, self._clock())
        return WaitEstimate(
            wait_s(
                version_queue.waiting.tokens_before(queued_request, deadline.at_s),
                version_queue.throughput.tokens_per_s(version_queue.slots),
            )
        )

    def estimate_new_request_wait(
        self, key: VersionKey, tenant: str, priority_class: PriorityClass
    ) -> tuple[float | None, bool]:
        """Return `(seconds or None, is_start)`: how long a new request would wait, and whether for a start.

        None means unknown. The wait for a start is unknown if the version has failed since its last answer: some
        request has to find out whether starts still fail.
        """
        version_queue = self._version_queues.get(key)
        if version_queue is None or version_queue.is_asleep:
            if key in self.version_breakers:
                return None, True
            return self._starts.wait_estimate(key, self._clock()).remaining_s, True
        tokens = version_queue.waiting.tokens_of(tenant, priority_class) if len(version_queue.waiting) else 0
        return wait_s(tokens, version_queue.throughput.tokens_per_s(version_queue.slots)), False

    def wake_for(self, key: VersionKey, for_s: float) -> None:
        """Wake a version at zero for `for_s` seconds although no request waits."""
        if self.is_asleep(key):
            self._waker.start_wake_for(key, for_s)

    def queue_length(self, key: VersionKey) -> int:
        """Return the number of requests that wait for the version."""
        version_queue = self._version_queues.get(key)
        return 0 if version_queue is None else len(version_queue.waiting)

    def throughput(self, key: VersionKey) -> Throughput | None:
        """Return how fast the version's slots come free, or None if the version has no queue here."""
        version_queue = self._version_queues.get(key)
        return None if version_queue is None else version_queue.throughput

    def replica_addresses(self) -> set[str]:
        """Return the sockets of all replicas."""
        return {
            replica.row.address
            for version_queue in self._version_queues.values()
            for replica in version_queue.replicas.values()
        }

    def apply(self, feed: Feed) -> None:
        """Apply a feed message. Waiting requests are notified before this returns."""
        self._tracker.apply(feed)

    def report_failed(self, replica: Replica, code: str = Unavailable.code) -> None:
        """Record that a request at this replica failed. The replica gets no requests for a moment.

        The feed reports whether the replica is gone. A code that is the version's fault counts against the version,
        too: after several in a row, no request waits for a start.
        """
        opened = self.replica_breakers.record_failure(replica, code)
        if code in INTEGRITY or (opened and code == ReplicaLost.code):
            row, retryable = replica.row, code not in INTEGRITY
            self.version_breakers.record_failure(row.tenant, row.version, code, self._clock(), retryable=retryable)
        if opened and (version_queue := self._version_queues.get(key := key_of(replica.row))) is not None:
            self.slot_allocator.grant(key, version_queue)  # with fewer slots, the shares change
            if self.slot_allocator.needs_wake(key):
                self._waker.start_wake(key)

    def report_ended(self, replica: Replica) -> None:
        """Forget a replica whose process has ended, before the feed reports it. Without replicas, requests wait for a
        start. The feed may already have another replica of that name, which stays.
        """
        if not replica.gone:
            self._tracker.remove(replica.row.runtime_id)

    def report_response_started(self, replica: Replica, credit: int | None) -> None:
        """Record that the replica began a response, so that it takes requests, and the credit that it reported."""
        if replica.breaker is not None:
            self.replica_breakers.drop(replica)
        now = self._clock()
        replica.credit.record_answer(credit, now)
        if replica.max_requests is not None or (credit is not None and credit < replica.row.max_streams):
            self.slot_allocator.review(replica, replica.running, now)
            version_queue = self._version_queues.get(key := key_of(replica.row))
            if version_queue is not None and len(version_queue.waiting):
                self.slot_allocator.grant(key, version_queue)

    def report_full(self, replica: Replica, credit: int) -> None:
        """Record that a full replica refused a request. The request's slot is not given back yet."""
        self.full_refusals += 1
        now = self._clock()
        replica.credit.record_refusal(credit, now)
        self.slot_allocator.review(replica, replica.running - 1, now)

    def report_response_completed(self, replica: Replica) -> None:
        """Clear the version's breaker after a whole answer. A faulty version fails before its first
        token, so this one works.
        """
        if self.version_breakers:
            self.version_breakers.drop(key_of(replica.row))

    async def acquire(
        self, key: VersionKey, queued_request: QueuedRequest, deadline: Deadline, retry_by_s: float | None = None
    ) -> Replica:
        """Wait for a slot and return its replica. Raises as entering `slot`. Release: `slot_allocator.release`."""
        now = self._clock()
        if self.version_breakers and self.is_asleep(key):
            self.version_breakers.check(key, now, self._start_problem_text(key, queued_request))
        version_queue = self.slot_allocator.ensure_version_queue(key)
        if now >= version_queue.next_review_s:
            if version_queue.waiting:
                self.slot_allocator.grant(key, version_queue)  # waiting requests come first
            else:
                self.slot_allocator.review_all(version_queue, now)
        if version_queue.waiting:
            self.slot_allocator.count_request(key, version_queue, queued_request)
        else:
            if now >= version_queue.shares.ends_s:
                version_queue.shares.refresh(now, 0)
            version_queue.shares.record_request(queued_request.tenant, queued_request.weight, 0)
        # No waiting request may take a free slot. So if this tenant may take one, no request is before it.
        is_free = version_queue.may_take(queued_request.tenant, queued_request.weight)
        facts = AdmissionFacts(
            is_free, queued_request, version_queue.waiting.queue_usage, self.usage_by_tenant, self._limits, deadline
        )
        match decide(facts, now):
            case Admit():
                version_queue.waiting.charge_immediate(queued_request)
                version_queue.throughput.record_grant(now)
                return self.slot_allocator.take_slot(version_queue, queued_request, now)
            case Shed(failure):
                self.slot_allocator.drop_if_empty(key, version_queue)
                raise Refused(failure)
            case Hold(until_s, full):
                self._check_time(key, version_queue, queued_request, until_s, now)
                waiter = _waiter(now, until_s)
                if full is None:
                    version_queue.waiting.put(waiter, queued_request, until_s)
                elif not self.load_shedder.try_enter(version_queue, waiter, queued_request):
                    self.slot_allocator.drop_if_empty(key, version_queue)
                    raise Refused(full)
                return await self._wait(key, version_queue, queued_request, waiter, retry_by_s)

    async def reacquire(
        self,
        key: VersionKey,
        replica: Replica,
        queued_request: QueuedRequest,
        deadline: Deadline,
        enqueued_at_s: float,
        retry_by_s: float | None,
    ) -> Replica:
        """Give back a slot whose replica refused the request, and wait for another one. Raises as `acquire`. The
        request arrived at `enqueued_at_s`. It returns to its former place, even if the queue is full now.
        """
        version_queue, until_s = (
            self.slot_allocator.ensure_version_queue(key),
            min(deadline.at_s, enqueued_at_s + self._limits.wait_s),
        )
        waiter = _waiter(enqueued_at_s, until_s)
        version_queue.waiting.put_first(waiter, queued_request, until_s)
        self.slot_allocator.give_back(key, replica, queued_request, 0)
        # A new queue has not counted this request, which waits or has a slot by now.
        version_queue.shares.record_request(
            queued_request.tenant, queued_request.weight, version_queue.waiting.waiting_of(queued_request.tenant) - 1
        )
        return await self._wait(key, version_queue, queued_request, waiter, retry_by_s)

    def check_integrity(self) -> None:
        """Assert that no request waits for a slot that is free for it, and that usage and replicas are consistent."""
        self.slot_allocator.check_integrity()
        self._tracker.check_integrity()

    def _check_time(
        self, key: VersionKey, version_queue: VersionQueue, queued_request: QueuedRequest, until_s: float, now: float
    ) -> None:
        """Raise Refused(DeadlineTooShort) if no slot is expected in time. A version at zero is woken anyway. Otherwise
        it would sleep for ever if all its callers have little time.
        """
        left_s = until_s - now
        if asleep := version_queue.is_asleep:
            expected_s = self._starts.wait_estimate(key, now).remaining_s
        else:
            expected_s = completion_time_s(
                version_queue.waiting.tokens_before(queued_request, until_s),
                queued_request,
                version_queue.throughput,
                version_queue.slots,
            )
        if expected_s is None or not is_too_late(expected_s, left_s):
            return
        if asleep:
            self._waker.start_wake_for(key, expected_s)
        self.slot_allocator.drop_if_empty(key, version_queue)
        self.load_shedder.count_refusal(Reason.LATE, queued_request)
        raise Refused(DeadlineTooShort(expected_s, left_s, asleep))

    async def _wait(
        self,
        key: VersionKey,
        version_queue: VersionQueue,
        queued_request: QueuedRequest,
        waiter: Waiter,
        retry_by_s: float | None,
    ) -> Replica:
        """Wait for the slot of a queued request. Any failure removes the request from the queue."""
        try:
            self.slot_allocator.schedule_grant(key, version_queue)
            if version_queue.is_asleep:
                self.version_breakers.enter(key, waiter, self._clock())
                self._waker.start_wake(key)
            async with asyncio.timeout(max(0.0, waiter.until_s - self._clock())):
                if retry_by_s is not None:
                    await asyncio.wait((waiter.assignment,), timeout=max(0.0, retry_by_s - self._clock()))
                    if not (waiter.assignment.done() or version_queue.awaits_start):
                        raise NoSlotInTime
                assignment = await waiter.assignment
                if isinstance(assignment, Failure):
                    raise Refused(assignment)
                return assignment
        except BaseException as error:
            self._leave(key, version_queue, waiter, queued_request)
            if isinstance(error, TimeoutError):
                stage, why = (
                    ("waiting for a replica to start", self._start_problem_text(key, queued_request))
                    if version_queue.is_asleep
                    else ("queued", "")
                )
                raise Refused(DeadlineExceeded(self._clock() - waiter.enqueued_at_s, stage, why)) from None
            raise
        finally:
            self.version_breakers.leave(key, waiter)

    def _start_problem_text(self, key: VersionKey, queued_request: QueuedRequest) -> str:
        """Return why the version does not start, or "" if that is unknown."""
        problem = self._starts.problem(key)
        return "" if problem is None else redact_for_caller(problem, queued_request.tenant == key.tenant).message

    def _leave(
        self, key: VersionKey, version_queue: VersionQueue, waiter: Waiter, queued_request: QueuedRequest
    ) -> None:
        """Remove a request that ends without using its slot: from the queue, or by giving back the slot it just got."""
        assignment = waiter.assignment
        if version_queue.waiting.discard(waiter):
            assignment.cancel()
        elif assignment.done() and not assignment.cancelled() and isinstance(replica := assignment.result(), Replica):
            self.slot_allocator.release(key, replica, queued_request, 0)
        if not self.slot_allocator.needs_wake(key):
            self._waker.stop_wake(key)
        self.slot_allocator.drop_if_empty(key, version_queue)

    def _reopen(self, replica: Replica) -> None:
        key = key_of(replica.row)
        version_queue = self._version_queues.get(key)
        if version_queue is not None:
            self.slot_allocator.grant(key, version_queue)
            if not version_queue.is_asleep:
                self._waker.stop_wake(key)


def _waiter(enqueued_at_s: float, until_s: float) -> Waiter:
    return Waiter(asyncio.get_running_loop().create_future(), enqueued_at_s, until_s)
