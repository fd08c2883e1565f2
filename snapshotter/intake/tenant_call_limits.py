"""Limit the concurrent calls of tenants: by number, by memory, or one at a time.

`KeyedLocks` serializes work by tenant or version. `CallLimiter` limits the number of calls; use it for work that needs
nothing more from a client. `BodyBudget` limits the bytes of bodies in transfer, so a client that sends nothing holds
nothing. A call that waits too long is refused with a retry time.
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

PERMIT_WAIT_S: Final = 10.0

# Reads the body of a request (see `request_bodies.py`) and calls its argument with the length of each piece. That call
# may refuse the piece.
ReadBody = Callable[[Callable[[int], None]], Awaitable[bytearray]]


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
    tenant out, however many tenants they belong to. A body that waits for its permit may be cut, too. A body with a
    permit can't be cut, but the number of permits is limited.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        self._name = name
        self._limit_bytes = limit_bytes
        self._bodies: dict[_Body, None] = {}  # in order of arrival
        self._held_bytes: Counter[str] = Counter()  # bytes, by tenant

    def __repr__(self) -> str:
        return f"<BodyBudget {self._name} held={self._held_bytes.total()}/{self._limit_bytes}>"

    @asynccontextmanager
    async def receive(
        self, tenant: str, read: ReadBody, permit: AbstractAsyncContextManager[None] | None = None
    ) -> AsyncIterator[bytearray]:
        """Read a body, then wait for `permit`, and hold both for the block. The body may be cut until the block begins.
        Raises as `read` and `permit` do, and `Refused(Overloaded)`.
        """
        with self._track_body(tenant) as body:
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(None) as body.timeout:
                        received = await read(partial(self._reserve, body))
                        if permit is not None:
                            await stack.enter_async_context(permit)
                except TimeoutError:
                    raise self._refusal() from None
                if body.timeout is None:  # cut just as it was complete
                    raise self._refusal()
                body.timeout = None
                yield received

    @asynccontextmanager
    async def hold(self, tenant: str, nbytes: int) -> AsyncIterator[None]:
        """Hold `nbytes` while the block sends them. The block may be cut. Raises `Refused(Overloaded)`."""
        with self._track_body(tenant) as body:
            try:
                async with asyncio.timeout(None) as body.timeout:
                    self._reserve(body, nbytes)
                    yield
            except TimeoutError:
                raise self._refusal() from None

    @contextmanager
    def _track_body(self, tenant: str) -> Iterator[_Body]:
        body = _Body(tenant)
        self._bodies[body] = None
        try:
            yield body
        finally:
            del self._bodies[body]
            self._release(body)

    def _reserve(self, body: _Body, nbytes: int) -> None:
        tenant_bytes = self._held_bytes[body.tenant] + nbytes
        if body.timeout is None or tenant_bytes > self._limit_bytes // 2:
            raise self._refusal()
        while self._held_bytes.total() + nbytes > self._limit_bytes:
            cuttable = [each for each in self._bodies if each.timeout is not None and each.nbytes]
            # The oldest body of the tenant that holds most
            victim = max(cuttable, key=lambda each: self._held_bytes[each.tenant], default=body)
            if self._held_bytes[victim.tenant] <= tenant_bytes:
                raise self._refusal()
            self._cut(victim)
        body.nbytes += nbytes
        self._held_bytes[body.tenant] = tenant_bytes

    def _cut(self, body: _Body) -> None:
        assert body.timeout is not None
        body.timeout.reschedule(asyncio.get_running_loop().time())
        body.timeout = None
        self._release(body)

    def _release(self, body: _Body) -> None:
        self._held_bytes[body.tenant] -= body.nbytes
        self._held_bytes += Counter()  # drops tenants without bytes
        body.nbytes = 0

    def _refusal(self) -> Refused:
        return Refused(Overloaded(self._name, self._limit_bytes, 1.0, "bytes"))


class CallLimiter:
    """At most `limit` calls at once, at most half of them for one tenant, first come, first served.

    A tenant's calls beyond its half wait in their own queue, so they delay no other tenant.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._tenant_shares = KeyedLocks(max(1, limit // 2))
        self._free = asyncio.Semaphore(limit)

    def __repr__(self) -> str:
        return f"<CallLimiter {self._name} limit={self._limit} tenants={len(self._tenant_shares)}>"

    @asynccontextmanager
    async def hold_permit(self, tenant: str, wait_s: float = PERMIT_WAIT_S) -> AsyncIterator[None]:
        """Hold a permit for the block. Raises `Refused(Overloaded)` after `wait_s`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(wait_s):
                    await stack.enter_async_context(self._tenant_shares.hold(tenant))
                    await stack.enter_async_context(self._free)
            except TimeoutError:
                raise Refused(Overloaded(self._name, self._limit, 1.0)) from None
            yield
