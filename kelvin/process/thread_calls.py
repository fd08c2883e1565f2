"""Blocking calls in threads, for calls that use memory or a descriptor of their caller's."""

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
