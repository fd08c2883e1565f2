"""Query a shared store with one query at a time per name (single-flight), each in a task of its own. A caller that
stops waiting does not cancel its query. Each query ends by itself: the store answers or is away.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")
StoreQuery = Coroutine[Any, Any, None]

CLOSE_S: Final = 1.0
# concurrent renewals: fast enough for all leases, and others need connections, too
MAX_CONCURRENT_QUERIES: Final = 8


class SingleFlight:
    """Running queries by name. `waiting` counts per name the units that waiting callers want."""

    def __init__(self) -> None:
        self.waiting: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<SingleFlight {len(self._tasks)}>"

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    async def query_until_decided(
        self, name: str, units: int, decide: Callable[[bool], T | None], build_query: Callable[[int], StoreQuery]
    ) -> T:
        """Return the first result of `decide` that is not None, and query the store before each further call.

        `decide` gets whether a query for that name is running. All callers wait for that query. If there is none,
        `build_query` makes one for the units of all waiting callers. Cancelling ends the wait, not the query.
        """
        while (result := decide(name in self._tasks)) is None:
            task = self._tasks.get(name) or self._start(name, build_query(self.waiting[name] + units))
            self.waiting[name] += units
            try:
                await asyncio.wait((task,))
            finally:
                self.waiting[name] -= units
                if not self.waiting[name]:
                    del self.waiting[name]
        return result

    async def maintain(self, names: Iterable[str], due_query: Callable[[str], StoreQuery | None]) -> None:
        """Run the due query of each name, MAX_CONCURRENT_QUERIES at a time. Names with a running query are skipped."""
        left = list(names)
        while left:
            batch, left = left[:MAX_CONCURRENT_QUERIES], left[MAX_CONCURRENT_QUERIES:]
            queries = [(name, due_query(name)) for name in batch if name not in self._tasks]
            if tasks := [self._start(name, query) for name, query in queries if query is not None]:
                await asyncio.wait(tasks)

    async def close(self, give_back: Awaitable[None]) -> None:
        """Await `give_back` for at most CLOSE_S, then wait for the running queries."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await give_back
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    def _start(self, name: str, query: StoreQuery) -> "asyncio.Task[None]":
        task = self._tasks[name] = asyncio.ensure_future(self._run_query(name, query))
        return task

    async def _run_query(self, name: str, query: StoreQuery) -> None:
        try:
            await query
        finally:
            del self._tasks[name]
