"""A clock that moves only when a test advances it. A minute of the autoscaler takes a millisecond."""

import asyncio
import heapq
from itertools import count


class VirtualClock:
    """A virtual clock. Sleepers wake in the order of their times. `advance` returns once every due task has run."""

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
        """Advance the clock, and run everything that becomes due."""
        end_us = self._now_us + int(seconds * 1e6)
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end_us:
            self._now_us, _, waking = heapq.heappop(self._sleepers)
            if not waking.done():
                waking.set_result(None)
            await settle()
        self._now_us = end_us


async def settle() -> None:
    """Run all tasks until each waits for time or for I/O."""
    for _ in range(20):
        await asyncio.sleep(0)
