"""Slots at replicas: which request holds which slot, which requests wait, and which is next.

`queue/policy/tenant_fair_queue.py` decides the order, `load_shedding.py` sheds from a full queue. The throttler decides
whether a request may wait.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from activator.queue.load_shedding import LoadShedder
from activator.queue.policy.admission import QueueLimits
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.replica_subsets import REVIEW_S
from activator.queue.policy.shed_order import ShedOrder
from activator.queue.policy.slot_shares import SlotShares
from activator.queue.policy.tenant_fair_queue import FairQueue, QueueEntry, cost
from activator.queue.version_queue import Replica, VersionQueue, Waiter
from activator.routing.policy.affinity import Occupancy, choose_replica, is_second_less_loaded
from activator.routing.policy.version_key import VersionKey, key_of


@dataclass(frozen=True, slots=True)
class ActivatorPeers:
    """The names of the activators that share the replicas."""

    own_name: str = ""
    names: Callable[[], tuple[str, ...]] = tuple  # sorted, including this one; () if unknown
    prefers_subset: bool = True  # whether each activator prefers some of the replicas


ALONE: Final = ActivatorPeers()


class SlotAllocator:
    """Slots and waiting requests of all versions. `clock` returns monotonic seconds, `draw(n)` a random number below
    `n`. Use from one event loop; no method awaits. Only this class takes and gives back slots.
    """

    def __init__(
        self,
        limits: QueueLimits,
        load_shedder: LoadShedder,
        peers: ActivatorPeers,
        clock: Callable[[], float],
        draw: Callable[[int], int],
    ) -> None:
        self._bound = limits.per_version
        self._load_shedder = load_shedder
        self._peers = peers
        self._clock = clock
        self._draw = draw
        self.version_queues: dict[VersionKey, VersionQueue] = {}
        self._shared_shed_order: ShedOrder[QueueEntry[Waiter]] = ShedOrder(limits.total)
        self.usage_by_tenant = self._shared_shed_order.usage_by_tenant

    def __repr__(self) -> str:
        running = sum(
            replica.running
            for version_queue in self.version_queues.values()
            for replica in version_queue.replicas.values()
        )
        queued = self.usage_by_tenant.total.entries
        return f"<SlotAllocator versions={len(self.version_queues)} running={running} queued={queued}>"

    def needs_wake(self, key: VersionKey) -> bool:
        """Return whether requests wait for a first replica."""
        version_queue = self.version_queues.get(key)
        return version_queue is not None and len(version_queue.waiting) > 0 and version_queue.is_asleep

    def take_slot(self, version_queue: VersionQueue, queued_request: QueuedRequest, now: float) -> Replica:
        """Take a free slot; there must be one. Prefer the replica of the request's affinity. Otherwise draw two free
        replicas, preferred ones first, and take the less loaded.
        """
        replica = _take_slot_of(
            version_queue, _choose_replica(version_queue, queued_request, self._draw), queued_request.tenant
        )
        _record_sent(version_queue, replica, now)
        if replica.breaker is not None:
            replica.breaker.enter(queued_request, now)
        return replica

    def try_take_other_replica(
        self, key: VersionKey, queued_request: QueuedRequest, excluded_replica: Replica
    ) -> Replica | None:
        """Take a slot of another replica than `excluded_replica`, if one without failures is free now."""
        version_queue = self.version_queues.get(key)
        if version_queue is None:
            return None
        self.count_request(key, version_queue, queued_request)
        if (
            not version_queue.may_take(queued_request.tenant, queued_request.weight)
            or (replica := _take_other(version_queue, excluded_replica, queued_request.tenant)) is None
        ):
            return None
        now = self._clock()
        version_queue.throughput.record_grant(now)
        _record_sent(version_queue, replica, now)
        return replica

    def release(self, key: VersionKey, replica: Replica, queued_request: QueuedRequest, tokens: int | None) -> None:
        """Give back the slot of `queued_request`, which took `tokens` (None: as estimated). The next waiting request
        has the slot when this returns.
        """
        version_queue = self.version_queues.get(key)
        if version_queue is not None and tokens is not None:
            version_queue.waiting.settle(queued_request, tokens)
        self.give_back(key, replica, queued_request, cost(queued_request.tokens) if tokens is None else tokens)

    def give_back(self, key: VersionKey, replica: Replica, queued_request: QueuedRequest, used_tokens: int) -> None:
        """Give back a slot that is settled already, or that another slot of the request settles."""
        assert replica.running > 0
        replica.running -= 1
        is_owner = queued_request.tenant == key.tenant
        replica.owner_running -= is_owner
        if replica.breaker is not None:
            replica.breaker.leave(queued_request)
        version_queue = self.version_queues.get(key)
        if version_queue is not None:
            if not replica.gone:
                version_queue.shares.owner_running -= is_owner
                version_queue.throughput.record_release(self._clock(), cost(queued_request.tokens), used_tokens)
            if len(version_queue.waiting) or not version_queue.replicas:
                self.grant(key, version_queue)

    def count_request(self, key: VersionKey, version_queue: VersionQueue, queued_request: QueuedRequest) -> None:
        """Count a request that needs a slot, or one more, in the slot shares. Grant slots that this frees for
        others.
        """
        if self._clock() >= version_queue.shares.ends_s:
            self.grant(key, version_queue)  # begin the next window first; it would drop this request's count
        if version_queue.shares.record_request(
            queued_request.tenant, queued_request.weight, version_queue.waiting.waiting_of(queued_request.tenant)
        ):
            self.grant(key, version_queue)

    def grant(self, key: VersionKey, version_queue: VersionQueue) -> None:
        """Assign free slots to the next waiting requests."""
        now = self._clock()
        if now >= version_queue.next_review_s:
            self.review_all(version_queue, now)
        version_queue.shares.refresh(now, version_queue.waiting.waiting_of(key.tenant))
        if len(version_queue.waiting):
            self._load_shedder.sweep(version_queue, now)
        while (
            len(version_queue.waiting)
            and version_queue.free
            and (found := self._load_shedder.next_waiter_in_time(version_queue, now)) is not None
        ):
            version_queue.throughput.record_grant(now)
            found[0].assignment.set_result(self.take_slot(version_queue, found[1], now))
        self.schedule_grant(key, version_queue)
        self.drop_if_empty(key, version_queue)

    def schedule_grant(self, key: VersionKey, version_queue: VersionQueue) -> None:
        """Schedule a grant for when waiting requests may get a slot without any other event. That is the next window of
        the shares, if a free slot is reserved for the owner, and the next change of a replica's credit.
        """
        if not len(version_queue.waiting):
            return
        now = self._clock()
        grant_at_s = now + version_queue.shares.refresh_in_s(now) if version_queue.free else inf
        if any(
            replica.max_requests is not None and not replica.is_closed for replica in version_queue.replicas.values()
        ):
            grant_at_s = min(grant_at_s, version_queue.next_review_s)
        if grant_at_s < version_queue.grant_at_s:
            if version_queue.grant_timer is not None:
                version_queue.grant_timer.cancel()
            version_queue.grant_at_s = grant_at_s
            version_queue.grant_timer = asyncio.get_running_loop().call_later(
                max(0.0, grant_at_s - now), self._grant_due, key, version_queue
            )

    def _grant_due(self, key: VersionKey, version_queue: VersionQueue) -> None:
        version_queue.grant_at_s, version_queue.grant_timer = inf, None
        if self.version_queues.get(key) is version_queue:
            self.grant(key, version_queue)

    def drop_if_empty(self, key: VersionKey, version_queue: VersionQueue) -> None:
        """Forget the version's queue if it has neither replicas nor waiting requests."""
        if (
            not version_queue.replicas
            and not len(version_queue.waiting)
            and self.version_queues.get(key) is version_queue
        ):
            del self.version_queues[key]  # a late caller may hold an older queue of the same version

    def ensure_version_queue(self, key: VersionKey) -> VersionQueue:
        """Return the version's queue. Creates it if needed."""
        version_queue = self.version_queues.get(key)
        if version_queue is None:
            queue: FairQueue[Waiter] = FairQueue(self._shared_shed_order, self._bound)
            version_queue = self.version_queues[key] = VersionQueue(queue, SlotShares(key.tenant))
        return version_queue

    def preferences(self) -> dict[bool, int]:
        """Return the number of replicas by whether this activator prefers them; {} without other activators."""
        if self._member_count < 2:
            return {}
        preferred = [
            replica.is_preferred
            for version_queue in self.version_queues.values()
            for replica in version_queue.replicas.values()
        ]
        return {True: sum(preferred), False: len(preferred) - sum(preferred)}

    @property
    def _member_count(self) -> int:
        return max(1, len(self._peers.names()))

    def review(self, replica: Replica, running: int, now: float) -> None:
        """Decide how many requests the replica may have, after it reported a credit."""
        again_s = replica.review(self._member_count, running, now)
        if (version_queue := self.version_queues.get(key_of(replica.row))) is not None:
            version_queue.next_review_s = min(version_queue.next_review_s, again_s)

    def review_all(self, version_queue: VersionQueue, now: float) -> None:
        """Decide how many requests each replica may have, and which of them are preferred."""
        members = self._member_count
        version_queue.next_review_s = now + REVIEW_S
        for replica in version_queue.replicas.values():
            version_queue.next_review_s = min(
                version_queue.next_review_s, replica.review(members, replica.running, now)
            )
        if not self._peers.prefers_subset:
            return
        slots = {name: each.row.max_streams for name, each in version_queue.replicas.items() if not each.row.draining}
        preferred = version_queue.subset.choose(
            self._peers.names(), slots, self._peers.own_name, version_queue.throughput.running, now
        )
        if preferred is not None:
            for name, replica in version_queue.replicas.items():
                replica.is_preferred = name in preferred

    def check_integrity(self) -> None:
        """Assert that no request waits for a slot that is free for it, and that usage adds up."""
        total = 0
        for key, version_queue in self.version_queues.items():
            version_queue.waiting.check_integrity()
            total += len(version_queue.waiting)
            version_queue.shares.check_integrity()
            for tenant in version_queue.waiting.tenants():
                weight = version_queue.waiting.weight_of(tenant)
                assert not version_queue.may_take(tenant, weight), f"{key} has a free slot, and {tenant} waits for it"
            running = sum(replica.running for replica in version_queue.replicas.values())
            assert version_queue.throughput.running == running
            assert version_queue.shares.owner_running == sum(
                each.owner_running for each in version_queue.replicas.values()
            )
            assert all(replica.running >= 0 for replica in version_queue.replicas.values())
        assert total == self.usage_by_tenant.total.entries


def _take_other(version_queue: VersionQueue, excluded_replica: Replica, tenant: str) -> Replica | None:
    """Take a free slot of the least loaded other replica that has no failures. Return None if there is none."""
    others = [
        each
        for each in version_queue.replicas.values()
        if each is not excluded_replica and each.free and each.breaker is None
    ]
    if not others:
        return None
    return _take_slot_of(version_queue, min(others, key=lambda each: each.running / each.slots), tenant)


def _take_slot_of(version_queue: VersionQueue, replica: Replica, tenant: str) -> Replica:
    replica.running += 1
    if tenant == version_queue.shares.owner:
        replica.owner_running += 1
        version_queue.shares.owner_running += 1
    version_queue.subset.peak_running = max(version_queue.subset.peak_running, version_queue.throughput.running)
    return replica


def _choose_replica(version_queue: VersionQueue, queued_request: QueuedRequest, draw: Callable[[int], int]) -> Replica:
    free = [replica for replica in version_queue.replicas.values() if replica.free]
    if len(free) == 1:
        return free[0]
    if queued_request.affinity is not None:
        free_ids = {replica.row.runtime_id for replica in free}
        name = choose_replica(queued_request.affinity, version_queue.ring, _open_occupancies(version_queue), free_ids)
        assert name is not None
        return version_queue.replicas[name]
    free = [replica for replica in free if replica.is_preferred] or free
    if len(free) == 1:
        return free[0]
    first = draw(len(free))
    second = draw(len(free) - 1)
    second += second >= first
    chosen, other = free[first], free[second]
    return other if is_second_less_loaded(_occupancy(chosen), _occupancy(other)) else chosen


def _open_occupancies(version_queue: VersionQueue) -> dict[str, Occupancy]:
    """Return the load of open replicas over all their slots, so that activators with equal requests choose alike."""
    return {
        name: Occupancy(replica.running, replica.row.max_streams)
        for name, replica in version_queue.replicas.items()
        if replica.is_open
    }


def _occupancy(replica: Replica) -> Occupancy:
    return Occupancy(replica.running, replica.slots)


def _record_sent(version_queue: VersionQueue, replica: Replica, now: float) -> None:
    """Record that a request goes to the replica, and how many slots this activator wants there. The replica is told."""
    replica.credit.record_sent(now)
    replica.wanted_slots = replica.running + -(-len(version_queue.waiting) // len(version_queue.replicas))
