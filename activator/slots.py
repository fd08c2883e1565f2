"""Slots at replicas: who has which, who waits, and who is next.

`policy/fair.py` decides whose turn it is, `shedding.py` who leaves a full queue. Whether a request may wait is the
throttler's to decide.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from activator.keys import VersionKey, key_of
from activator.line import Line, Replica, Waiter
from activator.policy.admission import QueueLimits
from activator.policy.affinity import Occupancy, choose, less_loaded
from activator.policy.ask import Ask
from activator.policy.crowd import Crowd
from activator.policy.fair import FairQueue, Place, cost
from activator.policy.slot_shares import SlotShares
from activator.policy.subsets import REVIEW_S
from activator.shedding import Shedding


@dataclass(frozen=True, slots=True)
class Peers:
    """The activators that share the replicas, by their names."""

    me: str = ""
    names: Callable[[], tuple[str, ...]] = tuple  # of all, this one included, in order; () where nobody knows
    prefer: bool = True  # whether each prefers some of the replicas


ALONE: Final = Peers()


class Slots:
    """Slots of all versions, and who waits for them. `clock` returns monotonic seconds, `draw(n)` a number below `n`.

    Each step runs on one event loop without an await in between. Slots are taken and given back here alone.
    """

    def __init__(
        self,
        limits: QueueLimits,
        shedding: Shedding,
        peers: Peers,
        clock: Callable[[], float],
        draw: Callable[[int], int],
    ) -> None:
        self._bound = limits.per_version
        self._shedding = shedding
        self._peers = peers
        self._clock = clock
        self._draw = draw
        self.lines: dict[VersionKey, Line] = {}
        self._everyone: Crowd[Place[Waiter]] = Crowd(limits.in_all)
        self.loads = self._everyone.loads

    def __repr__(self) -> str:
        running = sum(replica.running for line in self.lines.values() for replica in line.replicas.values())
        return f"<Slots versions={len(self.lines)} running={running} queued={self.loads.in_all.entries}>"

    def is_wanted(self, key: VersionKey) -> bool:
        """Return whether requests wait for a first replica."""
        line = self.lines.get(key)
        return line is not None and len(line.waiting) > 0 and line.is_asleep

    def take(self, line: Line, ask: Ask, now: float) -> Replica:
        """Take a free slot; there must be one. Prefer the replica that the request belongs to, else the less loaded of
        two that are drawn among the free ones, preferred ones first.
        """
        replica = _taken_by_one_more(line, _choose(line, ask, self._draw), ask.tenant)
        _send(line, replica, now)
        if replica.breaker is not None:
            replica.breaker.enter(ask, now)
        return replica

    def try_take_other(self, key: VersionKey, ask: Ask, than: Replica) -> Replica | None:
        """Take a slot of another replica than `than` if one without failures is free now."""
        line = self.lines.get(key)
        if line is None:
            return None
        self.count_request(key, line, ask)
        if not line.may_take(ask.tenant, ask.weight) or (other := _take_other(line, than, ask.tenant)) is None:
            return None
        now = self._clock()
        line.pace.took(now)
        _send(line, other, now)
        return other

    def release(self, key: VersionKey, replica: Replica, ask: Ask, tokens: int | None) -> None:
        """Give back the slot of `ask`, which took `tokens` (None: as estimated). The next waiting request has it on
        return.
        """
        line = self.lines.get(key)
        if line is not None and tokens is not None:
            line.waiting.settle(ask, tokens)
        self.give_back(key, replica, ask, cost(ask.tokens) if tokens is None else tokens)

    def give_back(self, key: VersionKey, replica: Replica, ask: Ask, took: int) -> None:
        """Give back the slot without settling in the queue: that is done already, or another slot of the request does
        it.
        """
        assert replica.running > 0
        replica.running -= 1
        is_owner = ask.tenant == key.tenant
        replica.owner_running -= is_owner
        if replica.breaker is not None:
            replica.breaker.leave(ask)
        line = self.lines.get(key)
        if line is not None:
            if not replica.gone:
                line.shares.owner_running -= is_owner
                line.pace.came_back(self._clock(), cost(ask.tokens), took)
            if len(line.waiting) or not line.replicas:
                self.grant(key, line)

    def count_request(self, key: VersionKey, line: Line, ask: Ask) -> None:
        """Count a request that wants a slot, or one more, in the slot shares. Give out the slots that this frees for
        others.
        """
        if self._clock() >= line.shares.ends_s:
            self.grant(key, line)  # begins the next window first: it would forget the request
        if line.shares.ask(ask.tenant, ask.weight, line.waiting.waiting_of(ask.tenant)):
            self.grant(key, line)

    def grant(self, key: VersionKey, line: Line) -> None:
        """Assign free slots to the next waiting requests."""
        now = self._clock()
        if now >= line.review_s:
            self.review_all(line, now)
        line.shares.refresh(now, line.waiting.waiting_of(key.tenant))
        if len(line.waiting):
            self._shedding.sweep(line, now)
        while len(line.waiting) and line.free and (found := self._shedding.next_in_time(line, now)) is not None:
            line.pace.took(now)
            found[0].granted.set_result(self.take(line, found[1], now))
        self.grant_later(key, line)
        self.tidy(key, line)

    def grant_later(self, key: VersionKey, line: Line) -> None:
        """Grant again when requests that wait may have a slot without any other event: in the next window of the
        shares, where a slot is free that is reserved for the owner, and when a replica may have more from here.
        """
        if not len(line.waiting):
            return
        now = self._clock()
        due_s = now + line.shares.refresh_in_s(now) if line.free else inf
        if any(replica.most is not None and not replica.is_closed for replica in line.replicas.values()):
            due_s = min(due_s, line.review_s)
        if due_s < line.due_s:
            if line.due is not None:
                line.due.cancel()
            line.due_s = due_s
            line.due = asyncio.get_running_loop().call_later(max(0.0, due_s - now), self._grant_due, key, line)

    def _grant_due(self, key: VersionKey, line: Line) -> None:
        line.due_s, line.due = inf, None
        if self.lines.get(key) is line:
            self.grant(key, line)

    def tidy(self, key: VersionKey, line: Line) -> None:
        """Forget the version's queue if it has neither replicas nor waiting requests."""
        if not line.replicas and not len(line.waiting) and self.lines.get(key) is line:
            del self.lines[key]  # whoever leaves late may hold an older line of the same version

    def line_of(self, key: VersionKey) -> Line:
        """Return the version's queue. Creates it if needed."""
        line = self.lines.get(key)
        if line is None:
            queue: FairQueue[Waiter] = FairQueue(self._everyone, self._bound)
            line = self.lines[key] = Line(queue, SlotShares(key.tenant))
        return line

    def preferences(self) -> dict[bool, int]:
        """Return the number of replicas that this activator prefers, and of the others; {} without other activators."""
        if self._members < 2:
            return {}
        every = [replica.is_preferred for line in self.lines.values() for replica in line.replicas.values()]
        return {True: sum(every), False: len(every) - sum(every)}

    @property
    def _members(self) -> int:
        return max(1, len(self._peers.names()))

    def review(self, replica: Replica, running: int, now: float) -> None:
        """Decide how many requests the replica may have, because it told a credit."""
        again_s = replica.review(self._members, running, now)
        if (line := self.lines.get(key_of(replica.row))) is not None:
            line.review_s = min(line.review_s, again_s)

    def review_all(self, line: Line, now: float) -> None:
        """Decide how many requests each replica may have, and which of them are preferred."""
        members = self._members
        line.review_s = now + REVIEW_S
        for replica in line.replicas.values():
            line.review_s = min(line.review_s, replica.review(members, replica.running, now))
        if not self._peers.prefer:
            return
        slots = {name: each.row.max_streams for name, each in line.replicas.items() if not each.row.draining}
        near = line.subset.choose(self._peers.names(), slots, self._peers.me, line.pace.running, now)
        if near is not None:
            for name, replica in line.replicas.items():
                replica.is_preferred = name in near

    def check_integrity(self) -> None:
        """No line has both a free slot and a waiter who may have it; loads add up."""
        total = 0
        for key, line in self.lines.items():
            line.waiting.check_integrity()
            total += len(line.waiting)
            line.shares.check_integrity()
            for tenant in line.waiting.tenants():
                weight = line.waiting.weight_of(tenant)
                assert not line.may_take(tenant, weight), f"{key} has a free slot, and {tenant} waits for it"
            running = sum(replica.running for replica in line.replicas.values())
            assert line.pace.running == running
            assert line.shares.owner_running == sum(each.owner_running for each in line.replicas.values())
            assert all(replica.running >= 0 for replica in line.replicas.values())
        assert total == self.loads.in_all.entries


def _take_other(line: Line, than: Replica, tenant: str) -> Replica | None:
    """Take a free slot of another replica than `than`: the least loaded one without failures. Return None if there is
    none.
    """
    others = [each for each in line.replicas.values() if each is not than and each.free and each.breaker is None]
    if not others:
        return None
    return _taken_by_one_more(line, min(others, key=lambda each: each.running / each.slots), tenant)


def _taken_by_one_more(line: Line, replica: Replica, tenant: str) -> Replica:
    replica.running += 1
    if tenant == line.shares.owner:
        replica.owner_running += 1
        line.shares.owner_running += 1
    line.subset.most = max(line.subset.most, line.pace.running)
    return replica


def _choose(line: Line, ask: Ask, draw: Callable[[int], int]) -> Replica:
    free = [replica for replica in line.replicas.values() if replica.free]
    if len(free) == 1:
        return free[0]
    if ask.affinity is not None:
        at = {replica.row.runtime_id for replica in free}
        name = choose(ask.affinity, line.ring, _open_ones(line), at)
        assert name is not None
        return line.replicas[name]
    free = [replica for replica in free if replica.is_preferred] or free
    if len(free) == 1:
        return free[0]
    first = draw(len(free))
    second = draw(len(free) - 1)
    second += second >= first
    chosen, other = free[first], free[second]
    return other if less_loaded(_taken(chosen), _taken(other)) else chosen


def _open_ones(line: Line) -> dict[str, Occupancy]:
    """By all slots of each, ours or not: two activators with equal requests prefer the same one."""
    return {
        name: Occupancy(replica.running, replica.row.max_streams)
        for name, replica in line.replicas.items()
        if replica.is_open
    }


def _taken(replica: Replica) -> Occupancy:
    return Occupancy(replica.running, replica.slots)


def _send(line: Line, replica: Replica, now: float) -> None:
    """Record that a request goes to the replica, and how many it is told that this activator wants there."""
    replica.credit.sent(now)
    replica.wants = replica.running + -(-len(line.waiting) // len(line.replicas))
