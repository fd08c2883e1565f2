"""Connect the event loop and threads: blocking calls in their own threads, and events from the engine's thread."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from runtime.drivers.interface import Event

T = TypeVar("T")
MAX_PENDING_BATCHES: Final = 64  # how many steps the loop may be behind before the engine waits
_POST_RETRY_S: Final = 1.0


async def run_in_thread(name: str, function: Callable[[], T]) -> T:
    """Return or raise what `function` does, in a daemon thread. Cancelling ends the wait, not the function.

    A pool's threads would be joined before the loop may close, however long they take. The thread inherits the caller's
    context, so its logs and spans belong to the caller's request.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # a T if there is no error

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # the caller gets it
            error = raised
        try:
            loop.call_soon_threadsafe(set_outcome, result, error)
        except RuntimeError:
            return  # the loop is closed, so no caller waits

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True).start()
    return await future


class ThreadBridge:
    """An ordered channel from the engine's thread to the event loop. A loop that is behind slows the engine."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[list[Event]], None],
        max_batches: int = MAX_PENDING_BATCHES,
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._slots = threading.BoundedSemaphore(max_batches)
        self._closed = False

    def post(self, events: list[Event]) -> None:
        """Post events from the engine's thread. Blocks until there is room, or the bridge is closed."""
        while not (self._closed or self._slots.acquire(timeout=_POST_RETRY_S)):
            pass
        if self._closed:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver_batch, events)
        except RuntimeError:  # the loop is closed
            self._closed = True

    def close(self) -> None:
        """Drop all further events. A post that waits returns within _POST_RETRY_S."""
        self._closed = True

    def _deliver_batch(self, events: list[Event]) -> None:
        self._slots.release()
        if not self._closed:
            self._deliver(events)
