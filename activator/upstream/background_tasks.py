"""Short background work that outlives its request. It has an owner, a time limit, and is awaited at the end."""

import asyncio
from collections.abc import Coroutine


class BackgroundTasks:
    """A set of tasks with time limits. asyncio's exception handler logs failures."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<BackgroundTasks running={len(self._running)}>"

    def start(self, coroutine: Coroutine[object, object, None], timeout_s: float) -> "asyncio.Task[None]":
        """Run `coroutine` in a task for at most `timeout_s` seconds, and return the task."""
        task = asyncio.create_task(_bounded(coroutine, timeout_s))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Wait for all tasks. Their time limits end them."""
        while self._running:
            await asyncio.wait(self._running)


async def _bounded(coroutine: Coroutine[object, object, None], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await coroutine
    except TimeoutError:
        return
