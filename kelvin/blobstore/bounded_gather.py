"""Many small calls of a store at once, but not too many: a listing's objects are looked at in a few round trips."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final, TypeVar

S = TypeVar("S")
T = TypeVar("T")

MAX_CONCURRENT: Final = 16


async def bounded_gather(
    function: Callable[[S], Awaitable[T]], items: Iterable[S], limit: int = MAX_CONCURRENT
) -> list[T]:
    """`function` of each item, in order, at most `limit` at once. The first failure ends the others and is raised;
    when this returns, raises or is cancelled, no call is under way.
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
    """Cancel what still runs and wait for all of it, however often the caller is cancelled meanwhile. What they raised
    is seen, and not raised again.
    """
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
            task.exception()  # seen
    if cancelled is not None:
        raise cancelled
