"""Tell the decider that a version at zero is wanted: once for all who wait, at once, and again while they wait."""

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


# Tells the decider that the version is wanted. Returns whether the decider took it.
WakeCall = Callable[[VersionKey], Awaitable[bool]]


class Waker:
    """One task for each version that is being woken, by who waits or by who could not; the throttler calls."""

    def __init__(self, send_wake: WakeCall, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._send_wake = send_wake
        self._clock = clock
        self._loops = Loops()
        self._tasks: dict[VersionKey, asyncio.Task[None]] = {}
        self._timed_wakes: dict[VersionKey, asyncio.Task[None]] = {}
        self._poked_us: dict[VersionKey, int] = {}

    def __repr__(self) -> str:
        return f"<Waker waking={len(self._tasks)} nudging={len(self._timed_wakes)}>"

    def start_wake(self, key: VersionKey) -> None:
        """Start poking, unless that goes on already."""
        if key not in self._tasks:
            # Stamped before the post: whatever the decider stamps then lies behind it.
            self._poked_us[key] = int(self._clock() * 1e6)
            body = partial(self._send_until_cancelled, key)
            self._tasks[key] = self._loops.start("wake", body, about=key, takes_readiness=False)

    def stop_wake(self, key: VersionKey) -> None:
        """Stop poking: a replica is there, the start failed, or nobody waits."""
        self._poked_us.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def start_wake_for(self, key: VersionKey, for_s: float) -> None:
        """Poke for `for_s` seconds although no request waits, because some would have. Does nothing while the version
        is poked already.
        """
        if key not in self._timed_wakes and key not in self._tasks:
            body = partial(self._send_until, key, self._clock() + for_s)
            task = self._timed_wakes[key] = self._loops.start("nudge", body, about=key, takes_readiness=False)
            task.add_done_callback(partial(self._forget_timed_wake, key))

    def stop_timed_wakes(self, tenant: str, version: str) -> None:
        """Stop nudging: the version has a replica, its start failed, or it was deleted."""
        for key in [key for key in self._timed_wakes if (key.tenant, key.version) == (tenant, version)]:
            self._timed_wakes.pop(key).cancel()

    def wake_sent_us(self, key: VersionKey) -> int | None:
        """Return when poking began (monotonic microseconds), or None if it does not go on."""
        return self._poked_us.get(key)

    async def close(self) -> None:
        """End all tasks."""
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
