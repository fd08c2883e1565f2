"""A clock that moves when told to: what is due happens in order, and a minute of the autoscaler takes a millisecond."""

import asyncio
import heapq
from itertools import count


class VirtualClock:
    """Sleepers wake in the order of their times. `advance` returns once everything that was due has run."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_us = int(start_s * 1e6)
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    def monotonic_us(self) -> int:
        return self._now_us

    def wall_s(self) -> int:
        return 1_700_000_000 + self._now_us // 1_000_000

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_us + int(seconds * 1e6), next(self._order), waking))
        await waking

    async def advance(self, seconds: float) -> None:
        """Let that much time pass."""
        end_us = self._now_us + int(seconds * 1e6)
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end_us:
            self._now_us, _, waking = heapq.heappop(self._sleepers)
            if not waking.done():
                waking.set_result(None)
            await settle()
        self._now_us = end_us


async def settle() -> None:
    """Let every task run until all of them wait for time or the outside."""
    for _ in range(20):
        await asyncio.sleep(0)
