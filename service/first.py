"""Wait for whichever comes first: nothing of what came later is left behind."""

import asyncio
from collections.abc import Awaitable


async def first(*works: Awaitable[object]) -> tuple[bool, ...]:
    """Until one of them is over; the others are cancelled then, and gone when this returns. So are all of them where
    who waits is cancelled. Of each whether it came to its own end. Raises what one of them raised.
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
