"""Locks by name, for as long as somebody wants them: what must not happen twice at once, by tenant or version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NamedLocks:
    """Each is held by one at a time, or by `at_once`. Fair among those who wait for the same name. Keeps nothing of
    names that nobody holds.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._locks: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<NamedLocks {sorted(self._locks)}>"

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Alone with `name` inside, or one of `at_once`; a cancelled waiter leaves the queue."""
        lock = self._locks.setdefault(name, asyncio.Semaphore(self._at_once))
        self._users[name] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)
