"""Refuse and count requests that are shed. `shed_decision.py` chooses them, `slot_allocator.py` decides when."""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from activator.queue.policy.admission import RETRY_AFTER_S, QueueLimits
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest
from activator.queue.policy.shed_decision import LateRequest, Reason, find_late_requests, required_time_s, try_enter
from activator.queue.policy.shed_order import ShedClass
from activator.queue.policy.tenant_fair_queue import FairQueue
from activator.queue.policy.wait_estimate import is_too_late, wait_s
from activator.queue.version_queue import VersionQueue, Waiter, next_waiter
from kelvin.contracts.errors import Failure
from kelvin.contracts.traffic_errors import DeadlineTooShort, ShedByFairShare, ShedByPriority

SWEEP_S: Final = 0.5  # shortest interval between two sweeps of one version's queue
SWEEP_EACH_S: Final = 0.00025  # added per queued request, since checking one takes 1 to 2 us
LONGEST_RETRY_S: Final = 60.0
# Refusals per event-loop iteration: each ends a request, and replicas' responses wait meanwhile.
REFUSALS_PER_TICK: Final = 8


class LoadShedder:
    """Sheds requests of all versions. `counts` holds their number by reason and priority class."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self.counts: Counter[tuple[Reason, PriorityClass]] = Counter()
        # Removed from their queue, but not refused yet.
        self._late: deque[tuple[Waiter, QueuedRequest, Failure]] = deque()

    def __repr__(self) -> str:
        return f"<LoadShedder {self.counts.total()}>"

    def count_refusal(self, reason: Reason, queued_request: QueuedRequest) -> None:
        """Count a new request that the throttler refused."""
        self.counts[reason, queued_request.priority_class] += 1

    def try_enter(self, version_queue: VersionQueue, waiter: Waiter, queued_request: QueuedRequest) -> bool:
        """Enter a full queue by refusing lower requests before this returns. Return False if `shed_decision.try_enter`
        finds no place.
        """
        after_s = _seconds_until_empty(
            version_queue
        )  # Computed first: nothing may fail between the removal of a request and its refusal.
        out = try_enter(version_queue.waiting, waiter, queued_request, waiter.until_s, self._limits)
        if out is None:
            self.count_refusal(Reason.FULL, queued_request)
            return False
        for shed_class, place in out:
            if shed_class is ShedClass.OVER:
                self._refuse_waiter(place.entry, place.queued_request, Reason.OVER_SHARE, ShedByFairShare(after_s))
            else:
                self._refuse_waiter(
                    place.entry,
                    place.queued_request,
                    Reason.DISPLACED,
                    ShedByPriority(place.queued_request.priority_class.name.lower(), after_s),
                )
        return True

    def sweep(self, version_queue: VersionQueue, now: float) -> None:
        """Refuse requests that can't finish in time, unless the last sweep was too recent. A request that was just
        given a slot needs two event-loop iterations to continue. The refusals come after those.
        """
        if now < version_queue.last_sweep_s + max(SWEEP_S, len(version_queue.waiting) * SWEEP_EACH_S):
            return
        version_queue.last_sweep_s = now
        if found := list(find_late_requests(version_queue.waiting, version_queue.throughput, version_queue.slots, now)):
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._remove_late, version_queue.waiting, found)

    def _remove_late(self, queue: FairQueue[Waiter], found: Sequence[LateRequest[Waiter]]) -> None:
        """Remove late requests and refuse them in order, a few per event-loop iteration. There may be hundreds."""
        is_refusing = bool(self._late)
        for late in found:
            if queue.discard(late.place.entry):
                failure = DeadlineTooShort(late.expected_s, max(0.0, late.remaining_s), False)
                self._late.append((late.place.entry, late.place.queued_request, failure))
        if not is_refusing:
            self._refuse_late()

    def next_waiter_in_time(self, version_queue: VersionQueue, now: float) -> tuple[Waiter, QueuedRequest] | None:
        """Return the next request for a slot. Refuse one that is too late if another request may take the slot."""
        slots, free, running = version_queue.slots, version_queue.free, version_queue.throughput.running

        def may_take(tenant: str) -> bool:
            return version_queue.shares.may_take(tenant, version_queue.waiting.weight_of(tenant), slots, free, running)

        while (found := next_waiter(version_queue, may_take)) is not None:
            waiter, queued_request = found
            remaining_s = waiter.until_s - now
            takes_s = required_time_s(version_queue.throughput, queued_request, now - waiter.enqueued_at_s, remaining_s)
            if not is_too_late(takes_s, remaining_s) or not any(map(may_take, version_queue.waiting.tenants())):
                return found
            version_queue.waiting.settle(queued_request, 0)
            self._refuse_waiter(
                waiter, queued_request, Reason.LATE, DeadlineTooShort(takes_s, max(0.0, remaining_s), False)
            )
        return None

    def _refuse_late(self) -> None:
        for _ in range(min(REFUSALS_PER_TICK, len(self._late))):
            waiter, queued_request, failure = self._late.popleft()
            self._refuse_waiter(waiter, queued_request, Reason.LATE, failure)
        if self._late:
            waiter.assignment.get_loop().call_soon(self._refuse_late)

    def _refuse_waiter(self, waiter: Waiter, queued_request: QueuedRequest, reason: Reason, failure: Failure) -> None:
        if not waiter.assignment.done():  # otherwise the request is already leaving
            waiter.assignment.set_result(failure)
            self.counts[reason, queued_request.priority_class] += 1


def _seconds_until_empty(version_queue: VersionQueue) -> float:
    """Return when a retry makes sense: the time to serve the queue at its current throughput, within bounds."""
    expected_s = wait_s(
        version_queue.waiting.queue_usage.tokens, version_queue.throughput.tokens_per_s(version_queue.slots)
    )
    return RETRY_AFTER_S if expected_s is None else min(max(expected_s, RETRY_AFTER_S), LONGEST_RETRY_S)
