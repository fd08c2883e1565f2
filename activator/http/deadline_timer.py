"""One deadline timer per connection, reused by its requests.

Requests arrive thousands of times per second and their deadlines hardly ever pass. A timer per request would be created
and cancelled each time. This timer keeps running and checks the current deadline when it fires.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

TICK_S: Final = 0.001  # a loop timer's resolution: a timer that is rounded down would fire early


class DeadlineTimer:
    """Calls back once for each `set` that is neither cleared nor replaced, never early, and at most two ticks late plus
    the delay of the event loop. With `is_persistent` the loop timer outlives its deadline, until it fires or `close` is
    called.
    """

    __slots__ = ("_callback", "_deadline_s", "_fires_at_s", "_is_persistent", "_timer")

    def __init__(self, *, is_persistent: bool = False) -> None:
        self._is_persistent = is_persistent
        self._deadline_s = self._fires_at_s = 0.0
        self._callback: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<DeadlineTimer set={self._callback is not None} timed={self._timer is not None}>"

    def set(self, deadline_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` at `deadline_s` (monotonic seconds), unless it is cleared or replaced before."""
        self._deadline_s, self._callback = deadline_s, callback
        if self._timer is None or deadline_s < self._fires_at_s:
            self._schedule()

    def extend_to(self, deadline_s: float) -> None:
        """Move the deadline to `deadline_s` at the earliest."""
        self._deadline_s = max(self._deadline_s, deadline_s)

    def clear(self, callback: Callable[[], None]) -> None:
        """Drop the callback. Do nothing if the next request has already set another one."""
        if self._callback != callback:
            return
        self._callback = None
        if not self._is_persistent:
            self._stop()

    def close(self) -> None:
        """Stop keeping the loop timer between deadlines. A deadline that is set still fires."""
        self._is_persistent = False
        if self._callback is None:
            self._stop()

    def _schedule(self) -> None:
        self._stop()
        self._fires_at_s = self._deadline_s
        left_s = max(0.0, self._deadline_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left_s + TICK_S, self._fire)

    def _fire(self) -> None:
        self._timer = None
        call = self._callback
        if call is None:
            return
        if time.monotonic() < self._deadline_s:
            self._schedule()
        else:
            self._callback = None
            call()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
