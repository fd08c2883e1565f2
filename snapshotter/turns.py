"""How many do something memory-hungry at once: the others wait a little, then are told to come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from contracts.errors import Refused
from contracts.traffic_errors import Overloaded

TURN_S: Final = 10.0


class Turns:
    """At most `limit` at once, in the order in which they came."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._free = asyncio.Semaphore(limit)

    def __repr__(self) -> str:
        return f"<Turns {self._what} limit={self._limit}>"

    @asynccontextmanager
    async def take(self, wait_s: float = TURN_S) -> AsyncIterator[None]:
        """A turn, for as long as the block lasts. Raises `Refused(Overloaded)` after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise Refused(Overloaded(self._what, self._limit, 1.0)) from None
        try:
            yield
        finally:
            self._free.release()
