"""Many small calls of a store at once, but not too many: a listing's objects are looked at in a few round trips."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

S = TypeVar("S")
T = TypeVar("T")

AT_ONCE: Final = 16


async def abreast(function: Callable[[S], Awaitable[T]], items: Iterable[S], limit: int = AT_ONCE) -> list[T]:
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
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[position] for position in range(len(results))]
