"""Time as the shells of the control plane see it. Policies take `now` as an argument; tests bring their own clock."""

import asyncio
import time
from typing import Protocol


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
