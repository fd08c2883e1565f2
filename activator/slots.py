"""A slot at a replica: which replica's it is, and how a block holds it. Who waits is the throttler's."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from activator.keys import VersionKey
from activator.line import Line, Replica
from activator.policy.affinity import Occupancy, choose, less_loaded
from activator.policy.ask import Ask
from contracts.deadline import Deadline


class NoSlotInTime(Exception):
    """No slot came until it had to, and no start is what is waited for."""


class Slots(Protocol):
    """Gives slots out and takes them back."""

    async def acquire(self, key: VersionKey, ask: Ask, deadline: Deadline, again_by_s: float | None) -> Replica:
        """Raises Refused, NoSlotInTime. Cancelling it while it waits leaves nothing behind."""
        ...

    def release(self, key: VersionKey, replica: Replica, ask: Ask, tokens: int | None) -> None:
        """Take the slot back. The request took `tokens`, None if that is unknown."""
        ...

    async def take_again(
        self, key: VersionKey, replica: Replica, ask: Ask, deadline: Deadline, came_s: float, again_by_s: float | None
    ) -> Replica:
        """Exchange the slot, whose replica refused the request, for another one. Raises as `acquire`."""
        ...

    def give_back(self, key: VersionKey, replica: Replica, ask: Ask, took: int) -> None:
        """Take the slot back without settling the request's cost, which another slot of it does. `took` is 0 if this
        slot had no answer.
        """
        ...


class Slot:
    """One request's place at a replica. `tokens`: what it has taken, for its holder to say; None: as estimated."""

    __slots__ = ("_again_by_s", "_ask", "_came_s", "_deadline", "_key", "_replica", "_slots", "tokens")

    def __init__(
        self,
        slots: Slots,
        key: VersionKey,
        ask: Ask,
        deadline: Deadline,
        came_s: float,
        again_by_s: float | None = None,
        held: Replica | None = None,
    ) -> None:
        self._slots = slots
        self._key = key
        self._ask = ask
        self._deadline = deadline
        self._came_s = came_s
        self._again_by_s = again_by_s
        self._replica = held
        self.tokens: int | None = None

    @property
    def replica(self) -> Replica:
        """Whose slot it is, while it is held."""
        assert self._replica is not None
        return self._replica

    async def __aenter__(self) -> "Slot":
        self._replica = await self._slots.acquire(self._key, self._ask, self._deadline, self._again_by_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def exchange(self) -> None:
        """Give this slot back, because its full replica refused the request, and wait for another one at the request's
        former place in the queue. Raises as entering.
        """
        replica, self._replica, self.tokens = self.replica, None, None
        self._replica = await self._slots.take_again(
            self._key, replica, self._ask, self._deadline, self._came_s, self._again_by_s
        )

    def release(self) -> None:
        """Give the slot back. Idempotent."""
        replica, self._replica = self._replica, None
        if replica is not None:
            self._slots.release(self._key, replica, self._ask, self.tokens)

    def outrun(self, told: "asyncio.Task[None] | None") -> None:
        """Give the slot back once `told` is done (None: now), without settling: another slot of the same request
        answers.
        """
        replica, self._replica = self._replica, None
        if replica is None:
            return
        if told is None:
            self._slots.give_back(self._key, replica, self._ask, 0)
        else:
            told.add_done_callback(lambda _: self._slots.give_back(self._key, replica, self._ask, 0))


def take_slot(line: Line, ask: Ask, draw: Callable[[int], int]) -> Replica:
    """Take a free slot; there must be one. Prefer the replica that the request belongs to, else the less loaded of two
    that are drawn among the free ones, preferred ones first. `draw(n)` returns a random number below n.
    """
    return _taken_by_one_more(line, _choose(line, ask, draw), ask.tenant)


def take_other(line: Line, than: Replica, tenant: str) -> Replica | None:
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
