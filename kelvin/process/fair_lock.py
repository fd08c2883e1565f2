"""A lock that is fair to tenants: start-time fair queueing by the seconds that each tenant holds it.

A tenant that holds the lock longer or more often waits longer for it. However many requests other tenants have, a new
tenant waits for at most one of each of them. Requests of one tenant are served in order of arrival.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Overloaded

RETRY_AFTER_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    tenant: str
    granted: asyncio.Future[None]


class FairLock:
    """An asyncio lock for one event loop. Safe to cancel."""

    def __init__(self, queue_name: str, waiting_max: int, waiting_max_per_tenant: int) -> None:
        """`queue_name` names the queue in errors. The limits bound the queue in total, and per tenant."""
        self._queue_name = queue_name
        self._waiting_max = waiting_max
        self._waiting_max_per_tenant = waiting_max_per_tenant
        self._is_held = False
        self._waiting: list[_Waiter] = []  # in the order of arrival
        self._virtual_time = 0.0  # start tag of the latest holder; an idle tenant gains no credit before it
        self._used: dict[str, float] = {}  # tenants ahead of the virtual time: seconds held over weight

    def __repr__(self) -> str:
        return f"<FairLock {self._queue_name} held={self._is_held} waiting={len(self._waiting)}/{self._waiting_max}>"

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the lock."""
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, tenant: str, weight: int = 1) -> AsyncIterator[None]:
        """Hold the lock for the block. Raises `Refused(Overloaded)` at once if the queue is full."""
        await self._acquire(tenant)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            yield
        finally:
            self._used[tenant] = self._start_tag(tenant) + (loop.time() - began_s) / weight
            self._release()

    async def _acquire(self, tenant: str) -> None:
        if not self._is_held:
            self._grant(tenant)
            return
        if len(self._waiting) >= self._waiting_max:
            raise Refused(Overloaded(self._queue_name, self._waiting_max, RETRY_AFTER_S))
        if sum(each.tenant == tenant for each in self._waiting) >= self._waiting_max_per_tenant:
            name = f"this tenant's part of {self._queue_name}"
            raise Refused(Overloaded(name, self._waiting_max_per_tenant, RETRY_AFTER_S))
        waiter = _Waiter(tenant, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter.granted
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:  # granted and cancelled at once
                self._release()
            raise

    def _release(self) -> None:
        self._is_held = False
        waiting = [each for each in self._waiting if not each.granted.done()]
        if not waiting:
            return
        earliest = min(waiting, key=lambda each: self._start_tag(each.tenant))  # the first of equals
        self._waiting.remove(earliest)
        self._grant(earliest.tenant)
        earliest.granted.set_result(None)

    def _grant(self, tenant: str) -> None:
        self._is_held = True
        self._virtual_time = self._start_tag(tenant)
        self._used = {each: used for each, used in self._used.items() if used > self._virtual_time}

    def _start_tag(self, tenant: str) -> float:
        return max(self._virtual_time, self._used.get(tenant, 0.0))

    def check_integrity(self) -> None:
        """Raise AssertionError if a request waits for a free lock, or a tenant has too many waiting requests."""
        assert self._is_held or all(each.granted.done() for each in self._waiting)  # done: cancelled, not yet removed
        waiting = Counter(each.tenant for each in self._waiting)
        assert all(count <= self._waiting_max_per_tenant for count in waiting.values())
