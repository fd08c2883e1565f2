"""Run one blocking call in a thread of its own, from the event loop. The thread never keeps the process alive."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(name: str, call: Callable[[], T]) -> T:
    """What `call` returns or raises. Cancelling gives up the wait, not the call.

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
