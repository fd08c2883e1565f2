"""Events cross from the engine's thread to the event loop. The only place where the two wait for each other."""

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from runtime.engine.interface import Event

MAX_BATCHES: Final = 64  # steps that the loop may be behind; then the engine waits
_LOOK_S: Final = 1.0


class Handover:
    """`post` from the engine's thread, delivery on the loop, in order. A loop that is behind slows the engine down."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[list[Event]], None],
        max_batches: int = MAX_BATCHES,
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._places = threading.BoundedSemaphore(max_batches)
        self._closed = False

    def post(self, events: list[Event]) -> None:
        """In the engine's thread. Returns when there is room for more, or nobody listens any longer."""
        while not self._places.acquire(timeout=_LOOK_S):
            if self._closed:
                return
        try:
            self._loop.call_soon_threadsafe(self._take, events)
        except RuntimeError:  # the loop is closed
            self._closed = True

    def close(self) -> None:
        """From now on events are lost, and the engine never waits."""
        self._closed = True

    def _take(self, events: list[Event]) -> None:
        self._places.release()
        if not self._closed:
            self._deliver(events)
