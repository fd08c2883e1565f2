"""How many do something memory-hungry at once: the others wait a little, then are told to come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from contracts.errors import Refused
from contracts.traffic_errors import Overloaded
from snapshotter.locks import NamedLocks

TURN_S: Final = 10.0


class Turns:
    """At most `limit` at once, and half of them of one tenant: who is slow keeps others of its own tenant waiting.

    In the order in which they came; what a tenant has beyond its half waits apart, in nobody's way.
    """

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._tenants = NamedLocks(max(1, limit // 2))
        self._free = asyncio.Semaphore(limit)

    def __repr__(self) -> str:
        return f"<Turns {self._what} limit={self._limit} tenants={len(self._tenants)}>"

    @asynccontextmanager
    async def take(self, tenant: str, wait_s: float = TURN_S) -> AsyncIterator[None]:
        """A turn, for as long as the block lasts. Raises `Refused(Overloaded)` after `wait_s`."""
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(wait_s):
                    await turn.enter_async_context(self._tenants.hold(tenant))
                    await turn.enter_async_context(self._free)
            except TimeoutError:
                raise Refused(Overloaded(self._what, self._limit, 1.0)) from None
            yield
