"""Between the event loop and threads: one blocking call in a thread of its own, and events from the engine's thread."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from runtime.drivers.interface import Event

T = TypeVar("T")
MAX_PENDING_BATCHES: Final = 64  # steps that the loop may be behind; then the engine waits
_POST_RETRY_S: Final = 1.0


async def run_in_thread(name: str, call: Callable[[], T]) -> T:
    """What `call` returns or raises, in a thread that never keeps the process alive. Cancelling gives up the wait, not
    the call.

    A pool's threads would be joined before the loop may close, however long they take. The thread works for the
    request that the caller works for.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # a T where there is no error

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # it is the caller's
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True).start()
    return await future


class ThreadBridge:
    """`post` from the engine's thread, delivery on the loop, in order. A loop that is behind slows the engine down."""

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
        """In the engine's thread. Returns when there is room for more, or nobody listens any longer."""
        while not (self._closed or self._slots.acquire(timeout=_POST_RETRY_S)):
            pass
        if self._closed:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver_batch, events)
        except RuntimeError:  # the loop is closed
            self._closed = True

    def close(self) -> None:
        """From now on events are lost, and no post waits. One that waits already returns within _POST_RETRY_S."""
        self._closed = True

    def _deliver_batch(self, events: list[Event]) -> None:
        self._slots.release()
        if not self._closed:
            self._deliver(events)
