"""Questions to a store that several activators share: for each name one at a time, in a task of its own, whoever waits.

The end of one who waits does not end the question, and a question ends by itself: a store answers, or is away.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

CLOSE_S: Final = 1.0


class Scripts(Protocol):
    """A store that runs scripts where all activators see what they did."""

    @property
    def is_up(self) -> bool:
        """Whether it answered last."""
        ...

    async def ask(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        """What the script answers. Raises Away, within a fraction of a second. Not to be repeated."""
        ...


class Keeps(Scripts, Protocol):
    """A store of scripts that keeps what is large, too."""

    async def keep(self, script: str, keys: tuple[str, ...], nbytes: int, *arguments: str | bytes | int) -> Any:
        """As `ask`, for a script that keeps so many bytes. Raises Away; Full, which is one, where there is no room."""
        ...


class Asking(Generic[K]):
    """Those under way, by name, and `waiting`: of each name what all who wait for its answer want, in their units."""

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
        """The question of that name, while it is under way."""
        return self._tasks.get(name)

    def start(self, name: K, question: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Ask it; there is none of that name. Once the task is done another one may be asked."""
        task = self._tasks[name] = asyncio.ensure_future(self._asked(name, question))
        return task

    async def wait(self, name: K, task: "asyncio.Task[None]", units: int = 1) -> None:
        """For the answer to a question, wanting so many of the next one."""
        self.waiting[name] += units
        try:
            await asyncio.wait((task,))
        finally:
            self.waiting[name] -= units
            if not self.waiting[name]:
                del self.waiting[name]

    async def close(self, give_back: Awaitable[None]) -> None:
        """Give back, as far as that is quick, and wait for what is being asked."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await give_back
        await self.answered()

    async def answered(self) -> None:
        """Wait for what is being asked."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _asked(self, name: K, question: Coroutine[Any, Any, None]) -> None:
        try:
            await question
        finally:
            del self._tasks[name]


async def each(every_s: float, tend: Callable[[], Awaitable[None]]) -> None:
    """Tend so often, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await tend()
