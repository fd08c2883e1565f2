"""Choose the requests to shed: the lowest in `shed_order.py` if a queue is full, and those that can't finish in time.
Pure; `load_shedding.py` refuses them. Only waiting requests are shed, never one that has a slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from activator.queue.policy.admission import QueueLimits
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.shed_order import ShedClass
from activator.queue.policy.tenant_fair_queue import FairQueue, QueueEntry, cost
from activator.queue.policy.wait_estimate import Throughput, is_too_late, wait_s

MARGIN: Final = 4.0  # response times vary: with an exponential distribution, 1 in 50 takes longer
MAX_DISPLACED: Final = 16  # most requests shed for one; a larger newcomer is refused

T = TypeVar("T")


class Reason(StrEnum):
    """Why a request got no slot although its deadline had not passed."""

    FULL = "full"  # the queue was full, and `try_enter` found no place for the newcomer
    DISPLACED = "displaced"
    OVER_SHARE = "over_share"  # displaced, because its tenant was over its share
    LATE = "late"  # it could not finish in time


def try_enter(
    queue: FairQueue[T], entry: T, queued_request: QueuedRequest, deadline_s: float, limits: QueueLimits
) -> list[tuple[ShedClass, QueueEntry[T]]] | None:
    """Add a request to the queue, and remove the lowest requests until everything fits. Return the removed ones.

    Each removed request is lower than the newcomer and than all that stay in that queue, except for the reserved shares
    of lower classes. Return None if the newcomer does not fit alone, is the lowest itself, or would displace more than
    MAX_DISPLACED. Then no request leaves, but the candidates count as the newest of their tenants.
    """
    bounds = (limits.per_version, limits.per_tenant, limits.total)
    if any(
        queued_request.nbytes > bound.nbytes or queued_request.tokens > bound.tokens for bound in bounds
    ):  # too large even for an empty queue
        return None
    queue.put(entry, queued_request, deadline_s)
    out: list[tuple[ShedClass, QueueEntry[T]]] = []
    while (found := _lowest(queue, queued_request, limits)) is not None:
        place = found[1]
        if place.entry is entry or len(out) == MAX_DISPLACED:
            queue.discard(entry)
            for _, back in reversed(out):
                back.queue.put_back(back)
            return None
        place.queue.discard(place.entry)
        out.append(found)
    return out


def _lowest(
    queue: FairQueue[T], queued_request: QueuedRequest, limits: QueueLimits
) -> tuple[ShedClass, QueueEntry[T]] | None:
    """Return the request to shed from the first queue that is too full, or None."""
    if queue.queue_usage.is_over(limits.per_version):
        return queue.shed_order.next_to_shed(queued_request.tenant)
    everyone = queue.shared_shed_order
    if everyone.usage_by_tenant.usage_of(queued_request.tenant).is_over(limits.per_tenant):
        return everyone.next_to_shed_of_tenant(queued_request.tenant, limits.per_tenant)
    if everyone.usage_by_tenant.total.is_over(limits.total):
        return everyone.next_to_shed(queued_request.tenant)
    return None


@dataclass(frozen=True, slots=True)
class LateRequest(Generic[T]):
    """A request that can't finish in time. `expected_s`: seconds until its answer would end, at the earliest."""

    place: QueueEntry[T]
    expected_s: float
    remaining_s: float


def completion_time_s(before: int, queued_request: QueuedRequest, throughput: Throughput, slots: int) -> float | None:
    """Return the seconds until the request's answer ends at the earliest, with `before` tokens served first. None if
    unknown. It is always unknown for the next request in line, since running requests are not counted.
    """
    begins_s = wait_s(before, throughput.tokens_per_s(slots)) if before else None
    return None if begins_s is None else begins_s + throughput.answer_duration_s(cost(queued_request.tokens))


def required_time_s(
    throughput: Throughput, queued_request: QueuedRequest, waited_s: float, remaining_s: float
) -> float:
    """Return the time that must be left for a slot to be useful, if another request could use the slot.

    A request that has waited longer than its remaining time needs MARGIN times its answer time. Otherwise each request
    would get its slot at the last possible moment, and many would still be late. A request that arrived with little
    time is exempt.
    """
    takes_s = throughput.answer_duration_s(cost(queued_request.tokens))
    return takes_s * MARGIN if waited_s > remaining_s else takes_s


def find_late_requests(queue: FairQueue[T], throughput: Throughput, slots: int, now: float) -> Iterator[LateRequest[T]]:
    """Yield requests that wait behind so much work of their own tenant that they can't finish in time. The first
    request of a tenant and class is never among them: it is next. Takes time linear in the waiting requests.
    """
    for places in queue.entries_by_backlog():
        before = 0
        for place in places:
            remaining_s = place.deadline_s - now
            takes_s = completion_time_s(before, place.queued_request, throughput, slots)
            if takes_s is not None and is_too_late(takes_s, remaining_s):
                yield LateRequest(place, takes_s, remaining_s)
            else:
                before += cost(place.queued_request.tokens)
