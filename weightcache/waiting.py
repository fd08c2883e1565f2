"""Leases come first: whoever loads in the background learns here when to begin, and when to give way."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from service.first import first

Key = tuple[str, str]  # tenant, version


class Waiting:
    """Which versions leases are waiting for."""

    def __init__(self) -> None:
        self._awaited: Counter[Key] = Counter()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Waiting awaited={len(self._awaited)}>"

    @contextmanager
    def leasing(self, key: Key) -> Iterator[None]:
        """A lease waits for this version while the block runs."""
        self._awaited[key] += 1
        self._tell()
        try:
            yield
        finally:
            self._awaited[key] -= 1
            if not self._awaited[key]:
                del self._awaited[key]
            self._tell()

    def is_busy(self, but: Key | None = None) -> bool:
        """Whether a lease waits for another version than `but`."""
        return any(key != but for key in self._awaited)

    async def until_free(self, but: Key | None = None) -> None:
        """Until no lease waits for another version than `but`."""
        while self.is_busy(but):
            await self._changed.wait()

    async def try_run(self, work: Callable[[], Awaitable[None]], key: Key) -> bool:
        """Run `work`, which is about that version. False where it was cancelled because a lease began to wait for
        another one; it is gone then. Raises what `work` raises.
        """
        is_done, _ = await first(work(), self._until_busy(key))
        return is_done

    async def _until_busy(self, but: Key) -> None:
        while not self.is_busy(but):
            await self._changed.wait()

    def _tell(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
