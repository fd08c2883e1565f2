"""Watch how the request bodies of one connection arrive. `address_limits_policy.py` defines "slow" and "padded"."""

import asyncio
from collections.abc import Callable

from activator.http.address_limits_policy import is_padded, is_slow
from activator.http.listener_state import ConnectionLimits


class BodyRateMonitor:
    """The framing and the speed of the bodies of one connection. Speed is measured in windows of `head_s`.

    `is_held` returns whether we hold up the body ourselves; such a window does not count as slow. `on_too_slow` is
    called after a window that was too slow.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        loop: asyncio.AbstractEventLoop,
        is_held: Callable[[], bool],
        on_too_slow: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._loop = loop
        self._is_held = is_held
        self._on_too_slow = on_too_slow
        self._raw_bytes = 0  # including the framing
        self._bytes = 0
        self._window_start_bytes = 0  # `_bytes` at the start of the current window
        self._has_been_held = False
        self._timer: asyncio.TimerHandle | None = None

    def record_raw_bytes(self, nbytes: int) -> None:
        """Count bytes read after the head, framing included."""
        self._raw_bytes += nbytes

    def record_body_bytes(self, nbytes: int) -> None:
        """Count bytes of the body itself."""
        self._bytes += nbytes
        self._has_been_held = self._has_been_held or self._is_held()

    @property
    def is_padded(self) -> bool:
        """Whether the framing is out of proportion to the body."""
        return is_padded(self._raw_bytes, self._bytes, self._limits.head_bytes)

    def watch(self) -> None:
        """Start a timed window if none is running. The body is not complete yet."""
        if self._timer is None:
            self._window_start_bytes = self._bytes
            self._has_been_held = self._is_held()
            self._timer = self._loop.call_later(self._limits.head_s, self._check_window)

    def stop(self) -> None:
        """Reset for the next body: this one is complete, or it is not needed any more."""
        self._raw_bytes = self._bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_window(self) -> None:
        """Check the window that has just ended."""
        self._timer = None
        window_bytes = self._bytes - self._window_start_bytes
        if self._has_been_held or not is_slow(window_bytes, self._limits.head_s, self._limits.body_rate):
            self.watch()
        else:
            self._on_too_slow()
