"""Clocks for the parts that decide by time. Policies take `now` as an argument; tests bring their own clock."""

import asyncio
import time
from typing import Final, Protocol

MIN_STEP_US: Final = 60_000_000  # what is less is no step: a clock is set right by and by


class Clock(Protocol):
    """Two clocks and a way to wait."""

    def monotonic_us(self) -> int:
        """Microseconds on a clock that never steps."""
        ...

    def wall_s(self) -> int:
        """Whole seconds since 1970, for what people read."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after that long."""
        ...


class SystemClock:
    """The machine's own."""

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_s(self) -> int:
        return int(time.time())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ClockStepDetector:
    """Finds steps of the wall clock, by the clock that never steps.

    What a clock that is wrong for a while must not undo, such as removing what is old, waits after a step.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_before_us = self._wall_offset_us()

    def stepped_us(self) -> int:
        """Return by how much the wall clock has stepped since the last call; 0 for none."""
        before_us, self._wall_before_us = self._wall_before_us, self._wall_offset_us()
        by_us = self._wall_before_us - before_us
        return by_us if abs(by_us) > MIN_STEP_US else 0

    def _wall_offset_us(self) -> int:
        """Return wall clock minus monotonic clock."""
        return self._clock.wall_s() * 1_000_000 - self._clock.monotonic_us()
