"""Own background tasks and loops, so that a scope ends each one. The tasks themselves are defined elsewhere."""

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from kelvin.process.loops import Body, Loops

log = logging.getLogger(__name__)


class Tasks:
    """A scope (`async with`) that ends every task and loop still running when the block is left.

    A task ends by itself; use `start_loop` for work that runs until the scope ends. A task that raises is a defect. It
    is logged and does not end other tasks, because one version's trouble must not stop the others.
    """

    def __init__(self) -> None:
        self._loops = Loops()
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Tasks {sorted(task.get_name() for task in self._running)}>"

    def __len__(self) -> int:
        return len(self._running)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await self._loops.close()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def start(self, work: Coroutine[Any, Any, None], name: str, *, detached: bool = False) -> None:
        """Run `work` as a task until it ends or the block is left. Once the block has been left, `work` is closed
        unstarted.

        With `detached`, the task does not inherit the caller's context, such as its trace: it does not work for that
        request.
        """
        if self._closed:
            work.close()
            return
        context = contextvars.Context() if detached else None
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def start_loop(self, name: str, body: Body) -> None:
        """Run `body` until the block is left, and restart it after each unexpected error. See `Loops.start`."""
        self._loops.start(name, body)

    async def wait_idle(self) -> None:
        """Wait until no task runs, also none that was started meanwhile. Does not wait for loops."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error, extra={"task": task.get_name()})


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and return once all are done. If the caller is cancelled meanwhile, raise CancelledError."""
    for each in tasks:
        each.cancel()
    cancellation: asyncio.CancelledError | None = None
    while not all(each.done() for each in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as cancelled:
            cancellation = cancelled
    if cancellation is not None:
        raise cancellation
