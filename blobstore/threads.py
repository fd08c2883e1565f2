"""Blocking calls in threads, for calls that use memory or a descriptor of their caller's."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_the_end(executor: Executor | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread of `executor` (None: the loop's own). A cancelled caller waits for the end of the call too, so
    that what the call uses is the caller's again when this returns or raises.
    """
    work = asyncio.get_running_loop().run_in_executor(executor, partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((work,))
        if not work.cancelled():
            work.exception()  # seen; the cancellation matters more
        raise


async def all_to_the_end(
    executor: Executor | None, calls: Sequence[Callable[[], T]], halt: Callable[[], None]
) -> list[T]:
    """Run each in a thread. Once one raises or the caller is cancelled, `halt` is called, which should make the others
    end early; all of them have ended when this returns or raises. Of several errors the first is raised.
    """
    loop = asyncio.get_running_loop()
    works = [loop.run_in_executor(executor, call) for call in calls]
    cancelled: asyncio.CancelledError | None = None
    failure: BaseException | None = None
    running = set(works)
    while running:
        try:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
            halt()
            continue
        for error_of_one in [work.exception() for work in done]:  # each is seen; the cancellation matters more
            if error_of_one is not None and failure is None:
                failure = error_of_one
                halt()
    if cancelled is not None:
        raise cancelled
    if failure is not None:
        raise failure
    return [work.result() for work in works]
