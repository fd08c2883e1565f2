"""Who is shed: those who are lowest in the order of `shed_order` where a queue is full, and those who can't be in time.

Pure; `load_shedding.py` refuses them. A request that has a slot waits no more, so that none is ever shed here.
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

MARGIN: Final = 4.0  # answers vary: of those that last as long as chance has it one in fifty takes longer
MAX_DISPLACED: Final = 16  # that make way for one: a request that is as large as more of them is refused

T = TypeVar("T")


class Reason(StrEnum):
    """Why a request got no slot although it had time."""

    FULL = "full"  # it came to a full queue, and was the lowest itself
    DISPLACED = "displaced"
    OVER_SHARE = "over_share"  # displaced, too
    LATE = "late"  # it could not be in time any more, or not from the start


def try_enter(
    queue: FairQueue[T], entry: T, queued_request: QueuedRequest, deadline_s: float, limits: QueueLimits
) -> list[tuple[ShedClass, QueueEntry[T]]] | None:
    """Wait beside the others, as far as there is room; until there is, the lowest of the queue that is too full leaves
    it. Returns who left, of which each was lower than the newcomer and than all who stayed in that queue, but for what
    lower ranks keep of it. Returns None where the newcomer is the lowest itself, does not fit alone, or needs the room
    of more than MOST: then nobody leaves, and those that were tried count as the newest of their tenants.
    """
    bounds = (limits.per_version, limits.per_tenant, limits.in_all)
    if any(
        queued_request.nbytes > bound.nbytes or queued_request.tokens > bound.tokens for bound in bounds
    ):  # it would not fit alone
        return None
    queue.put(entry, queued_request, deadline_s)
    out: list[tuple[ShedClass, QueueEntry[T]]] = []
    while (found := _lowest(queue, queued_request, limits)) is not None:
        place = found[1]
        if place.entry is entry or len(out) == MAX_DISPLACED:
            queue.discard(entry)
            for _, back in reversed(out):
                back.home.put_back(back)
            return None
        place.home.discard(place.entry)
        out.append(found)
    return out


def _lowest(
    queue: FairQueue[T], queued_request: QueuedRequest, limits: QueueLimits
) -> tuple[ShedClass, QueueEntry[T]] | None:
    """Of the first queue that is too full."""
    if queue.queue_usage.is_over(limits.per_version):
        return queue.shed_order.next_to_shed(queued_request.tenant)
    everyone = queue.shared_shed_order
    if everyone.loads.of(queued_request.tenant).is_over(limits.per_tenant):
        return everyone.next_to_shed_of_tenant(queued_request.tenant, limits.per_tenant)
    if everyone.loads.in_all.is_over(limits.in_all):
        return everyone.next_to_shed(queued_request.tenant)
    return None


@dataclass(frozen=True, slots=True)
class LateRequest(Generic[T]):
    """One who can't be in time: an answer would have ended so many seconds from now at the earliest."""

    place: QueueEntry[T]
    expected_s: float
    remaining_s: float


def completion_time_s(before: int, queued_request: QueuedRequest, throughput: Throughput, slots: int) -> float | None:
    """Until its answer has ended at the earliest, with so many tokens that are served first; None where nobody knows.
    Nothing is known of one that is next: what runs before it is not counted.
    """
    begins_s = wait_s(before, throughput.tokens_per_s(slots)) if before else None
    return None if begins_s is None else begins_s + throughput.answer_s(cost(queued_request.tokens))


def required_time_s(
    throughput: Throughput, queued_request: QueuedRequest, waited_s: float, remaining_s: float
) -> float:
    """The time that must be left for a slot to be of use to it, where another one could have it. Who has waited for
    longer than is left needs some more than its answer takes: else each would have its slot in the last moment in which
    it may do, and many of them in vain. Who came with little time is not held to that.
    """
    takes_s = throughput.answer_s(cost(queued_request.tokens))
    return takes_s * MARGIN if waited_s > remaining_s else takes_s


def find_late_requests(queue: FairQueue[T], throughput: Throughput, slots: int, now: float) -> Iterator[LateRequest[T]]:
    """Who waits behind so much of its own tenant that it can't be in time, and so only takes a place. The first of
    each is never among them: what else would its turn be for? Takes time linear in who waits.
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
