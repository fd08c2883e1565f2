"""Ask a store that several activators share: one question at a time for each name, in a task of its own.

A caller that stops waiting does not end its question. Each question ends by itself: the store answers or is away.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

CLOSE_S: Final = 1.0


class Scripts(Protocol):
    """A store that runs scripts and shows their effects to all activators."""

    @property
    def is_up(self) -> bool:
        """Whether it answered last."""
        ...

    async def ask(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        """Run the script and return its answer. Raises Away within a fraction of a second. Do not repeat it: it may
        have run.
        """
        ...


class Asking(Generic[K]):
    """Questions under way, by name. `waiting` counts for each name the units that its waiting callers want."""

    def __init__(self) -> None:
        self.waiting: Counter[K] = Counter()
        self._tasks: dict[K, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Asking {len(self._tasks)}>"

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def of(self, name: K) -> "asyncio.Task[None] | None":
        """Return the task of the question under way for that name, or None."""
        return self._tasks.get(name)

    def start(self, name: K, question: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a question; none may be under way for that name. Once the task is done another one may be started."""
        task = self._tasks[name] = asyncio.ensure_future(self._asked(name, question))
        return task

    async def wait(self, name: K, task: "asyncio.Task[None]", units: int = 1) -> None:
        """Wait for the answer to a question, while counting `units` that the next one should ask for."""
        self.waiting[name] += units
        try:
            await asyncio.wait((task,))
        finally:
            self.waiting[name] -= units
            if not self.waiting[name]:
                del self.waiting[name]

    async def close(self, give_back: Awaitable[None]) -> None:
        """Await `give_back` for at most CLOSE_S, then wait for the questions under way."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await give_back
        await self.answered()

    async def answered(self) -> None:
        """Wait until no question is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _asked(self, name: K, question: Coroutine[Any, Any, None]) -> None:
        try:
            await question
        finally:
            del self._tasks[name]


async def each(every_s: float, tend: Callable[[], Awaitable[None]]) -> None:
    """Call `tend` every `every_s` seconds, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await tend()
