"""Owns background tasks and loops: whoever starts one has somebody to end it. What they do is not its concern."""

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from kelvin.process.loops import Body, Loops

log = logging.getLogger(__name__)


class Tasks:
    """An `async with` block that ends every task and loop still running when it is left.

    A task ends by itself; `start_loop` is for what runs until then. A task that raises is a defect: it is logged and
    stays alone, since one version's trouble must not end the others.
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
        """Run `work` until it ends or the block is left; after that it is not begun.

        `detached`: it is not done for the request that the caller works for, though that may have set it off.
        """
        if self._closed:
            work.close()
            return
        context = contextvars.Context() if detached else None
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def start_loop(self, name: str, body: Body) -> None:
        """Run `body` until the block is left, again after each unexpected error. See `Loops.start`."""
        self._loops.start(name, body)

    async def wait_idle(self) -> None:
        """Wait until no task runs, tasks started meanwhile included. Loops go on."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error, extra={"task": task.get_name()})


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancels them, and returns once all are done. Raises CancelledError then, where the caller was told to end."""
    for each in tasks:
        each.cancel()
    told: asyncio.CancelledError | None = None
    while not all(each.done() for each in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as cancelled:
            told = cancelled
    if told is not None:
        raise told
