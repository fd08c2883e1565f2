"""Run many small store calls concurrently, with a limit, so that reading a whole listing takes few round trips."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final, TypeVar

S = TypeVar("S")
T = TypeVar("T")

MAX_CONCURRENT: Final = 16


async def bounded_gather(
    function: Callable[[S], Awaitable[T]], items: Iterable[S], limit: int = MAX_CONCURRENT
) -> list[T]:
    """Return the results of `function` for all items, in order, with at most `limit` calls at once. The first failure
    cancels the other calls and is raised. When this returns, raises or is cancelled, no call still runs.
    """
    left = iter(enumerate(items))
    results: dict[int, T] = {}

    async def work() -> None:
        for position, item in left:
            results[position] = await function(item)

    workers = [asyncio.create_task(work()) for _ in range(limit)]
    try:
        await asyncio.gather(*workers)
    finally:
        await cancel_and_wait(workers)
    return [results[position] for position in range(len(results))]


async def cancel_and_wait(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel all tasks and wait until they end, even if the caller is cancelled. Their exceptions are dropped."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved
    if cancelled is not None:
        raise cancelled
