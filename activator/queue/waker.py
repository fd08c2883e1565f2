"""Wake versions at zero: tell the autoscaler at once that a version is needed, and again while requests wait. There is
one wake per version, however many requests wait.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from activator.routing.policy.version_key import VersionKey
from kelvin.process.loops import Loops

log = logging.getLogger(__name__)

AGAIN_S: Final = 2.0
RETRY_S: Final = 0.1


# Tells the autoscaler that the version is needed. Returns whether the autoscaler accepted it.
WakeCall = Callable[[VersionKey], Awaitable[bool]]


class Waker:
    """Runs one task per version that is being woken. The throttler calls it."""

    def __init__(self, send_wake: WakeCall, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._send_wake = send_wake
        self._clock = clock
        self._loops = Loops()
        self._tasks: dict[VersionKey, asyncio.Task[None]] = {}
        self._timed_wakes: dict[VersionKey, asyncio.Task[None]] = {}
        self._wake_sent_us: dict[VersionKey, int] = {}

    def __repr__(self) -> str:
        return f"<Waker waking={len(self._tasks)} timed={len(self._timed_wakes)}>"

    def start_wake(self, key: VersionKey) -> None:
        """Start sending wake calls, if that is not running yet."""
        if key not in self._tasks:
            # Taken before the call, so that the autoscaler's own time of it is later.
            self._wake_sent_us[key] = int(self._clock() * 1e6)
            body = partial(self._send_until_cancelled, key)
            self._tasks[key] = self._loops.start("wake", body, about=key, takes_readiness=False)

    def stop_wake(self, key: VersionKey) -> None:
        """Stop the wake calls: a replica has appeared, the start failed, or no request waits."""
        self._wake_sent_us.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def start_wake_for(self, key: VersionKey, for_s: float) -> None:
        """Send wake calls for `for_s` seconds, because of a request that was answered elsewhere instead of waiting. Do
        nothing if the version is being woken already.
        """
        if key not in self._timed_wakes and key not in self._tasks:
            body = partial(self._send_until, key, self._clock() + for_s)
            task = self._timed_wakes[key] = self._loops.start("nudge", body, about=key, takes_readiness=False)
            task.add_done_callback(partial(self._forget_timed_wake, key))

    def stop_timed_wakes(self, tenant: str, version: str) -> None:
        """Stop timed wakes: the version has a replica, its start failed, or it was deleted."""
        for key in [key for key in self._timed_wakes if (key.tenant, key.version) == (tenant, version)]:
            self._timed_wakes.pop(key).cancel()

    def wake_sent_us(self, key: VersionKey) -> int | None:
        """Return when the wake began (monotonic microseconds), or None if none is running."""
        return self._wake_sent_us.get(key)

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        self._tasks.clear()
        self._timed_wakes.clear()
        await self._loops.close()

    def _forget_timed_wake(self, key: VersionKey, task: asyncio.Task[None]) -> None:
        if self._timed_wakes.get(key) is task:
            del self._timed_wakes[key]

    async def _send_until(self, key: VersionKey, until_s: float) -> None:
        while True:
            pause_s = AGAIN_S if await self._send_wake(key) else RETRY_S
            await asyncio.sleep(pause_s)
            if self._clock() >= until_s:
                return

    async def _send_until_cancelled(self, key: VersionKey) -> None:
        while True:
            pause_s = AGAIN_S if await self._send_wake(key) else RETRY_S
            await asyncio.sleep(pause_s)
