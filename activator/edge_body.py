"""How the body of a request comes: how it is framed, and whether slower than a body may while nobody but its sender
holds it up. What is slow or padded is `policy/edge_rates`'s to say.
"""

import asyncio
from collections.abc import Callable

from activator.policy.edge_rates import is_padded, is_slow
from activator.settings import EdgeLimits


class BodyPace:
    """One connection's, of one body after the other. `is_held`: whether we, and not the client, hold it up just now;
    `is_late` is called once a window was too slow.
    """

    def __init__(
        self,
        limits: EdgeLimits,
        loop: asyncio.AbstractEventLoop,
        is_held: Callable[[], bool],
        is_late: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._loop = loop
        self._is_held = is_held
        self._is_late = is_late
        self._raw_bytes = 0  # with what frames it
        self._bytes = 0
        self._before = 0  # of these, before the window that is timed
        self._was_held = False
        self._timer: asyncio.TimerHandle | None = None

    def read(self, nbytes: int) -> None:
        """So much was read behind the head."""
        self._raw_bytes += nbytes

    def came(self, nbytes: int) -> None:
        """So much of it was the body."""
        self._bytes += nbytes
        self._was_held = self._was_held or self._is_held()

    @property
    def is_padded(self) -> bool:
        """Whether its frames are out of all proportion to it."""
        return is_padded(self._raw_bytes, self._bytes, self._limits.head_bytes)

    def watch(self) -> None:
        """It is not whole yet: from now on windows are timed."""
        if self._timer is None:
            self._before = self._bytes
            self._was_held = self._is_held()
            self._timer = self._loop.call_later(self._limits.head_s, self._judge)

    def stop(self) -> None:
        """It is whole, or nobody waits for it: the next one begins anew."""
        self._raw_bytes = self._bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _judge(self) -> None:
        """A window has passed."""
        self._timer = None
        if self._was_held or not is_slow(self._bytes - self._before, self._limits.head_s, self._limits.body_rate):
            self.watch()
        else:
            self._is_late()
