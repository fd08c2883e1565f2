"""How many do something memory-hungry at once: the others wait a little, then are told to come back.

`Turns` are counted, and so for work that goes on by itself. What waits for a client has `ByteRoom`: a client that sends
nothing holds nothing.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final

from contracts.errors import Refused
from contracts.traffic_errors import Overloaded
from snapshotter.locks import NamedLocks

TURN_S: Final = 10.0


class ByteRoom:
    """Memory for bodies while they are received: at most `limit_bytes` in all, and half of that for one tenant."""

    def __init__(self, what: str, limit_bytes: int) -> None:
        self._what = what
        self._limit_bytes = limit_bytes
        self._held: Counter[str] = Counter()  # bytes, by tenant

    def __repr__(self) -> str:
        return f"<ByteRoom {self._what} held={self._held.total()}/{self._limit_bytes}>"

    @contextmanager
    def hold(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Yield what takes so many bytes more, until the block ends. It raises `Refused(Overloaded)`."""
        held = 0

        def take(nbytes: int) -> None:
            nonlocal held
            in_all, of_tenant = self._held.total() + nbytes, self._held[tenant] + nbytes
            if in_all > self._limit_bytes or of_tenant > self._limit_bytes // 2:
                raise Refused(Overloaded(self._what, self._limit_bytes, 1.0))
            held += nbytes
            self._held[tenant] += nbytes

        try:
            yield take
        finally:
            self._held[tenant] -= held
            self._held += Counter()  # forgets tenants without any


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
