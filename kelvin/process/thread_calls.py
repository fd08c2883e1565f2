"""Run blocking calls in threads if they use memory or a descriptor of their caller."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_uncancellable(
    executor: Executor | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `function` in a thread of `executor` (None: the loop's own). A cancelled caller still waits for the end of
    the call. After this returns or raises, the thread no longer uses the caller's memory or descriptors.
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
