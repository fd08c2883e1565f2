"""Provide clocks to code that decides by time. Policies take `now` as an argument; tests bring their own clock."""

import asyncio
import time
from typing import Final, Protocol

MIN_STEP_US: Final = 60_000_000  # smaller differences are no step, because time synchronization slews the clock


class Clock(Protocol):
    """A monotonic clock, a wall clock, and a way to sleep."""

    def monotonic_us(self) -> int:
        """Return microseconds on a clock that never steps."""
        ...

    def wall_s(self) -> int:
        """Return whole seconds since 1970, for times that people read."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_s(self) -> int:
        return int(time.time())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ClockStepDetector:
    """Detects steps of the wall clock by comparing it with the monotonic clock.

    After a step, wait before you do anything that a wrong clock must not cause, such as deleting old data.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_before_us = self._wall_offset_us()

    def stepped_us(self) -> int:
        """Return by how much the wall clock has stepped since the last call. Return 0 for no step."""
        before_us, self._wall_before_us = self._wall_before_us, self._wall_offset_us()
        by_us = self._wall_before_us - before_us
        return by_us if abs(by_us) > MIN_STEP_US else 0

    def _wall_offset_us(self) -> int:
        return self._clock.wall_s() * 1_000_000 - self._clock.monotonic_us()
