"""One lock per name, for as long as somebody wants it: what must not happen twice at once, by tenant or version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NamedLocks:
    """Fair among those who wait for the same name. Keeps nothing of names that nobody holds."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<NamedLocks {sorted(self._locks)}>"

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Alone with `name` inside; a cancelled waiter leaves the queue."""
        lock = self._locks.setdefault(name, asyncio.Lock())
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
