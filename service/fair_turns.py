"""Take turns at something scarce, shared fairly by tenant (start-time fair queueing, by the time that turns last).

A tenant that holds turns for longer, or asks for more of them, waits longer for its next one. However many requests
other tenants have, a newcomer waits for one turn of each of them at the most.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from contracts.errors import Refused
from contracts.traffic_errors import Overloaded

RETRY_AFTER_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    tenant: str
    granted: asyncio.Future[None]


class FairTurns:
    """One turn at a time. Belongs to one event loop. Safe to cancel."""

    def __init__(self, what: str, most_waiting: int, most_of_tenant: int) -> None:
        """`what` is waited for; the limits are of those that wait, in all and of one tenant."""
        self._what = what
        self._most_waiting = most_waiting
        self._most_of_tenant = most_of_tenant
        self._is_taken = False
        self._waiting: list[_Waiter] = []  # in the order in which they came
        self._used: dict[str, float] = {}  # by tenant, where it is ahead of `_floor`: seconds over its weight
        self._floor = 0.0  # where the tenant began whose turn it is: nobody has a claim from before that

    def __repr__(self) -> str:
        return f"<FairTurns {self._what} taken={self._is_taken} waiting={len(self._waiting)}/{self._most_waiting}>"

    @asynccontextmanager
    async def take(self, tenant: str, weight: int = 1) -> AsyncIterator[None]:
        """A turn, for as long as the block lasts. Raises `Refused(Overloaded)` at once where too many wait."""
        await self._wait(tenant)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            yield
        finally:
            self._used[tenant] = max(self._used.get(tenant, 0.0), self._floor) + (loop.time() - began_s) / weight
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        if not self._is_taken:
            self._begin(tenant)
            return
        if len(self._waiting) >= self._most_waiting:
            raise Refused(Overloaded(self._what, self._most_waiting, RETRY_AFTER_S))
        if sum(each.tenant == tenant for each in self._waiting) >= self._most_of_tenant:
            raise Refused(Overloaded(f"this tenant's part of {self._what}", self._most_of_tenant, RETRY_AFTER_S))
        waiter = _Waiter(tenant, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter.granted
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:  # it was granted in the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._is_taken = False
        waiting = [each for each in self._waiting if not each.granted.done()]
        if not waiting:
            return
        best = min(waiting, key=lambda each: max(self._used.get(each.tenant, 0.0), self._floor))  # the first of equals
        self._waiting.remove(best)
        self._begin(best.tenant)
        best.granted.set_result(None)

    def _begin(self, tenant: str) -> None:
        self._is_taken = True
        self._floor = max(self._floor, self._used.get(tenant, 0.0))
        self._used = {each: used for each, used in self._used.items() if used > self._floor}

    def check_integrity(self) -> None:
        """Nobody waits for a turn that is free, and no tenant has more than its part of the queue."""
        assert self._is_taken or not self._waiting
        assert all(n <= self._most_of_tenant for n in Counter(each.tenant for each in self._waiting).values())
