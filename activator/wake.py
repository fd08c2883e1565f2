"""Tell the decider that a version at zero is wanted: once for all who wait, at once, and again while they wait."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from activator.keys import VersionKey

log = logging.getLogger(__name__)

AGAIN_S: Final = 2.0
RETRY_S: Final = 0.1


class Poke(Protocol):
    """Sends one stat."""

    async def poke(self, key: VersionKey) -> bool:
        """Whether the decider took it."""
        ...


class Waker:
    """One task for each version that is being woken; `ensure` and `rest` are the throttler's to call."""

    def __init__(self, poke: Poke, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._poke = poke
        self._clock = clock
        self._tasks: dict[VersionKey, asyncio.Task[None]] = {}
        self._poked_us: dict[VersionKey, int] = {}

    def __repr__(self) -> str:
        return f"<Waker waking={len(self._tasks)}>"

    def ensure(self, key: VersionKey) -> None:
        """Start telling, unless somebody's wait started it already."""
        if key not in self._tasks:
            # Stamped before the post: whatever the decider stamps then lies behind it.
            self._poked_us[key] = int(self._clock() * 1e6)
            self._tasks[key] = asyncio.create_task(self._keep_telling(key), name=f"wake-{key}")

    def rest(self, key: VersionKey) -> None:
        """Stop telling: a replica is there, the start failed, or nobody waits."""
        self._poked_us.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def poked_us(self, key: VersionKey) -> int | None:
        """When telling started (monotonic microseconds), where it goes on."""
        return self._poked_us.get(key)

    async def close(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_telling(self, key: VersionKey) -> None:
        while True:
            pause_s = AGAIN_S if await self._poke.poke(key) else RETRY_S
            await asyncio.sleep(pause_s)
