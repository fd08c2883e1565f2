"""One OSError while the decider is told that a version is wanted, and it is never told again: callers wait for a start
until their deadlines.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from service.loops import Loops
from tests.simulation.undone import Undoing

WORLD = "door"
SIGN = r"^versions_that_are_wanted_are_asked_for"
SEED = 447_052_345_554


def _start(self: Loops, name: str, body: Callable[[], Coroutine[Any, Any, None]], **_: object) -> "asyncio.Task[None]":
    async def once() -> None:
        try:
            await body()
        except OSError:
            return

    task = asyncio.get_running_loop().create_task(once(), name=name)
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    return task


def undo(undoing: Undoing) -> None:
    undoing.method(Loops, "start", _start)
