"""The time of a request, of one after another on a connection: a timer that goes on, and looks whether it is time.

A timer of each request's own would be made and ended some thousand times a second, and hardly ever ring.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

TICK_S: Final = 0.001  # what a loop's timers count in: one that is rounded down would ring too early


class DeadlineTimer:
    """Rings once for each `set`, never early; late by two ticks at the most, and by what the loop is late itself.

    With `is_persistent` its timer outlives what it was set for, until it rings or `close`.
    """

    __slots__ = ("_at_s", "_call", "_due_s", "_is_persistent", "_timer")

    def __init__(self, *, is_persistent: bool = False) -> None:
        self._is_persistent = is_persistent
        self._at_s = self._due_s = 0.0
        self._call: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<DeadlineTimer set={self._call is not None} timed={self._timer is not None}>"

    def set(self, at_s: float, call: Callable[[], None]) -> None:
        """Call it then (monotonic), unless it is cleared before, or set for another time."""
        self._at_s, self._call = at_s, call
        if self._timer is None or at_s < self._due_s:
            self._schedule()

    def extend_to(self, at_s: float) -> None:
        """What it is set for, if anything, is called no sooner than then."""
        self._at_s = max(self._at_s, at_s)

    def clear(self, call: Callable[[], None]) -> None:
        """It is not called. Nothing where it is set for another by now: the next request, as this one's task ends."""
        if self._call != call:
            return
        self._call = None
        if not self._is_persistent:
            self._stop()

    def close(self) -> None:
        """What it is set for now is the last."""
        self._is_persistent = False
        if self._call is None:
            self._stop()

    def _schedule(self) -> None:
        self._stop()
        self._due_s = self._at_s
        left_s = max(0.0, self._at_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left_s + TICK_S, self._fire)

    def _fire(self) -> None:
        self._timer = None
        call = self._call
        if call is None:
            return
        if time.monotonic() < self._at_s:
            self._schedule()
        else:
            self._call = None
            call()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
