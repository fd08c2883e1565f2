"""A tenant's running requests are counted and refused beyond its limit, independently of other tenants. The same tests
run for a local counter and for one that activators share over a real Redis.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager

import pytest

from activator.limits.concurrency_limits import ConcurrencyLimiter, LocalConcurrencyLimiter
from activator.limits.leased_quotas import SharedConcurrencyLimiter
from activator.limits.redis_store import open_store
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import TenantBusy
from tests.activator.redis_server import RedisServer


@asynccontextmanager
async def over(server: RedisServer, name: str = "one") -> AsyncIterator[SharedConcurrencyLimiter]:
    """Yield the limiter of one activator. A busy machine may answer late, so its Redis timeout is long."""
    async with asyncio.timeout(60), open_store(server.url, name, 20.0) as store:
        places = SharedConcurrencyLimiter(store)
        yield places
        await places.close()


@asynccontextmanager
async def alone() -> AsyncIterator[ConcurrencyLimiter]:
    yield LocalConcurrencyLimiter()


@asynccontextmanager
async def over_redis() -> AsyncIterator[ConcurrencyLimiter]:
    with RedisServer() as server:
        async with over(server) as places:
            yield places


EACH = pytest.mark.parametrize("opened", [alone, over_redis])
Opened = Callable[[], AbstractAsyncContextManager[ConcurrencyLimiter]]


async def refused(concurrency_limiter: ConcurrencyLimiter, tenant: str, limit: int) -> TenantBusy | None:
    """Return the refusal of one more request, or None if it would be admitted. It is not kept."""
    try:
        with await concurrency_limiter.acquire_permit(tenant, limit):
            return None
    except Refused as error:
        return error.failure if isinstance(error.failure, TenantBusy) else None


@EACH
async def test_concurrent_requests_are_limited_per_tenant(opened: Opened) -> None:
    """Each tenant has its own limit. A permit is released however its request ends."""
    async with opened() as concurrency_limiter:
        with await concurrency_limiter.acquire_permit("a", 2):
            with await concurrency_limiter.acquire_permit("a", 2), await concurrency_limiter.acquire_permit("b", 1):
                assert await refused(concurrency_limiter, "a", 2) == TenantBusy(2, 1.0)
                with await concurrency_limiter.acquire_permit("c", None):
                    assert "running=4" in repr(concurrency_limiter)
            await settled(concurrency_limiter, "a", 2)
            place = await concurrency_limiter.acquire_permit("a", 2)
            with pytest.raises(KeyError), place:
                raise KeyError
            assert await refused(concurrency_limiter, "a", 2) is None
        assert "running=0" in repr(concurrency_limiter)


async def settled(concurrency_limiter: ConcurrencyLimiter, tenant: str, limit: int) -> None:
    """Wait until one more request is admitted. Over Redis that takes a moment after a refusal."""
    async with asyncio.timeout(30):
        while await refused(concurrency_limiter, tenant, limit) is not None:
            await asyncio.sleep(0.01)


@EACH
async def test_lowered_limit_admits_nobody_until_free(opened: Opened) -> None:
    """Running requests continue. None is admitted until fewer run than the new limit."""
    async with opened() as concurrency_limiter:
        with await concurrency_limiter.acquire_permit("a", 3), await concurrency_limiter.acquire_permit("a", 3):
            if isinstance(concurrency_limiter, SharedConcurrencyLimiter):
                await (
                    concurrency_limiter.maintain()
                )  # unused permits of the old limit are returned with the next renewal
            assert await refused(concurrency_limiter, "a", 1) == TenantBusy(1, 1.0)
        await settled(concurrency_limiter, "a", 1)


@EACH
async def test_concurrent_arrivals_get_exactly_the_limit(opened: Opened) -> None:
    """Five of ten concurrent requests are admitted. A cancelled one leaves no permit behind."""
    async with opened() as concurrency_limiter:
        got = await asyncio.gather(*(concurrency_limiter.acquire_permit("a", 5) for _ in range(5)))
        with ExitStack() as stack:
            for place in got:
                stack.enter_context(place)
            refusals = await asyncio.gather(*(refused(concurrency_limiter, "a", 5) for _ in range(5)))
            assert refusals == [TenantBusy(5, 1.0)] * 5
        leaving = asyncio.ensure_future(concurrency_limiter.acquire_permit("b", 1))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        await settled(concurrency_limiter, "b", 1)
        assert "running=0" in repr(concurrency_limiter)
