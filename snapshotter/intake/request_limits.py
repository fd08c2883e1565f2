"""Limit concurrent requests by name, by number, or by memory.

`KeyedLocks` serializes work by tenant or version. `RequestLimiter` limits the number of jobs; use it for work that
needs nothing more from a client. `BodyBudget` limits the bytes of bodies in transfer, so a client that sends nothing
holds nothing. A request that waits too long is refused with a retry time.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Overloaded

TURN_S: Final = 10.0

# Reads the body of a request (see `request_bodies.py`) and calls its argument with the length of each piece. That call
# may refuse the piece.
Read = Callable[[Callable[[int], None]], Awaitable[bytearray]]


class KeyedLocks:
    """Locks by name, each held by one user, or by `at_once`. Fair per name. Unused names take no memory."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._locks: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<KeyedLocks {sorted(self._locks)}>"

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of `name` in the block. A cancelled waiter leaves the queue."""
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


@dataclass(slots=True, eq=False)
class _Body:
    tenant: str
    nbytes: int = 0
    timeout: asyncio.Timeout | None = None  # set while the body is in transfer and may be cut


class BodyBudget:
    """Memory for bodies in transfer: at most `limit_bytes` in all, and half of that for one tenant.

    If it is full, the oldest body in transfer of the tenant that holds most is cut. So slow or stalled clients keep no
    tenant out, however many tenants they belong to. A body that waits for its turn may be cut, too. A body that has its
    turn can't be cut, but the number of turns is limited.
    """

    def __init__(self, what: str, limit_bytes: int) -> None:
        self._what = what
        self._limit_bytes = limit_bytes
        self._bodies: dict[_Body, None] = {}  # in order of arrival
        self._held: Counter[str] = Counter()  # bytes, by tenant

    def __repr__(self) -> str:
        return f"<BodyBudget {self._what} held={self._held.total()}/{self._limit_bytes}>"

    @asynccontextmanager
    async def receive(
        self, tenant: str, read: Read, turn: AbstractAsyncContextManager[None] | None = None
    ) -> AsyncIterator[bytearray]:
        """Read a body, then wait for `turn`, and hold both for the block. The body may be cut until the block begins.
        Raises as `read` and `turn` do, and `Refused(Overloaded)`.
        """
        with self._body_of(tenant) as body:
            async with AsyncExitStack() as held_turn:
                try:
                    async with asyncio.timeout(None) as body.timeout:
                        content = await read(partial(self._take, body))
                        if turn is not None:
                            await held_turn.enter_async_context(turn)
                except TimeoutError:
                    raise self._full() from None
                if body.timeout is None:  # cut just as it was complete
                    raise self._full()
                body.timeout = None
                yield content

    @asynccontextmanager
    async def lend(self, tenant: str, nbytes: int) -> AsyncIterator[None]:
        """Hold `nbytes` while the block sends them. The block may be cut. Raises `Refused(Overloaded)`."""
        with self._body_of(tenant) as body:
            try:
                async with asyncio.timeout(None) as body.timeout:
                    self._take(body, nbytes)
                    yield
            except TimeoutError:
                raise self._full() from None

    @contextmanager
    def _body_of(self, tenant: str) -> Iterator[_Body]:
        body = _Body(tenant)
        self._bodies[body] = None
        try:
            yield body
        finally:
            del self._bodies[body]
            self._give_back(body)

    def _take(self, body: _Body, nbytes: int) -> None:
        of_tenant = self._held[body.tenant] + nbytes
        if body.timeout is None or of_tenant > self._limit_bytes // 2:
            raise self._full()
        while self._held.total() + nbytes > self._limit_bytes:
            moving = [each for each in self._bodies if each.timeout is not None and each.nbytes]
            first = max(moving, key=lambda each: self._held[each.tenant], default=body)  # the oldest one of that tenant
            if self._held[first.tenant] <= of_tenant:
                raise self._full()
            self._cut(first)
        body.nbytes += nbytes
        self._held[body.tenant] = of_tenant

    def _cut(self, body: _Body) -> None:
        assert body.timeout is not None
        body.timeout.reschedule(asyncio.get_running_loop().time())
        body.timeout = None
        self._give_back(body)

    def _give_back(self, body: _Body) -> None:
        self._held[body.tenant] -= body.nbytes
        self._held += Counter()  # drops tenants without bytes
        body.nbytes = 0

    def _full(self) -> Refused:
        return Refused(Overloaded(self._what, self._limit_bytes, 1.0, "bytes"))


class RequestLimiter:
    """At most `limit` jobs at once, at most half of them for one tenant, first come, first served.

    A tenant's jobs beyond its half wait in their own queue, so they delay no other tenant.
    """

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._tenants = KeyedLocks(max(1, limit // 2))
        self._free = asyncio.Semaphore(limit)

    def __repr__(self) -> str:
        return f"<RequestLimiter {self._what} limit={self._limit} tenants={len(self._tenants)}>"

    @asynccontextmanager
    async def take(self, tenant: str, wait_s: float = TURN_S) -> AsyncIterator[None]:
        """Hold a turn for the block. Raises `Refused(Overloaded)` after `wait_s`."""
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(wait_s):
                    await turn.enter_async_context(self._tenants.hold(tenant))
                    await turn.enter_async_context(self._free)
            except TimeoutError:
                raise Refused(Overloaded(self._what, self._limit, 1.0)) from None
            yield
