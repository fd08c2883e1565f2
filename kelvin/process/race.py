"""Race awaitables: wait for the first one and cancel the others. No task outlives the call."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Cancelled

T = TypeVar("T")


async def first_completed(*works: Awaitable[object]) -> tuple[bool, ...]:
    """Wait until one of these is done, then cancel the others and wait for their ends. Cancelling the caller cancels
    them all. Return for each whether it ended by itself. Raises what one of them raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return tuple(not task.cancelled() for task in tasks)


async def run_until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel the work and raise `Refused(Cancelled)`. The
    request's body must have been read. Without this, a server would finish work for a client that has left.
    """
    work_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(wait_disconnected(receive))
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise Refused(Cancelled())
        return work_task.result()
    finally:
        work_task.cancel()
        disconnect_task.cancel()
        await asyncio.wait({work_task, disconnect_task})


async def wait_disconnected(receive: Receive) -> None:
    """Return when the client of a request has disconnected. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
