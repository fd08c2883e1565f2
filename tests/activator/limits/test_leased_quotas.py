"""Permits of a tenant over several activators and one real Redis: never more than the limit, with few queries."""

import asyncio
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from activator.limits.concurrency_limits import Permit
from activator.limits.leased_quotas import SharedConcurrencyLimiter
from activator.limits.policy.held_quota import PERMITS
from activator.limits.redis_store import open_store
from kelvin.contracts.errors import Refused
from tests.activator.clock import Clock
from tests.activator.limits.test_concurrency_limits import over, refused, settled
from tests.activator.redis_server import RedisServer, is_up, wait_until_up
from tests.activator.world import world

LIMIT = 12


@pytest.mark.parametrize("shared", [pytest.param(True, id="one Redis"), pytest.param(False, id="control: two")])
@pytest.mark.parametrize("seed", range(4))
async def test_activators_never_exceed_the_shared_limit(redis: RedisServer, shared: bool, seed: int) -> None:
    """Requests come and leave and leases are renewed in random order. Permits that one activator does not use are
    available to the other.
    """
    draw = random.Random(seed)
    with RedisServer() as other:
        async with over(redis) as one, over(redis if shared else other, "two") as two:
            inside: list[tuple[SharedConcurrencyLimiter, Permit]] = []
            most = 0

            async def come(concurrency_limiter: SharedConcurrencyLimiter) -> None:
                nonlocal most
                try:
                    place = await concurrency_limiter.acquire_permit("a", LIMIT)
                except Refused:
                    return
                place.__enter__()
                inside.append((concurrency_limiter, place))
                most = max(most, len(inside))

            for _ in range(60):
                concurrency_limiter, many = draw.choice((one, two)), draw.randrange(1, 6)
                tending = [concurrency_limiter.maintain()] if draw.random() < 0.3 else []
                await asyncio.gather(*(come(concurrency_limiter) for _ in range(many)), *tending)
                for _ in range(draw.randrange(0, 6) if inside else 0):
                    if inside:
                        inside.pop(draw.randrange(len(inside)))[1].__exit__()
            await asyncio.gather(
                *(come(concurrency_limiter) for concurrency_limiter in (one, two) for _ in range(LIMIT))
            )
            assert (most <= LIMIT) == shared
            for _, place in inside:
                place.__exit__()
            await one.maintain()
            await one.maintain()
            with ExitStack() as stack:
                for _ in range(LIMIT):
                    await settled(two, "a", LIMIT)
                    stack.enter_context(await two.acquire_permit("a", LIMIT))
                assert await refused(two, "a", LIMIT) is not None


async def test_few_requests_query_the_concurrency_store(redis: RedisServer) -> None:
    """Sequential requests query Redis for the first and for renewals only. Concurrent ones share a query."""
    async with over(redis) as one:
        await refused(one, "c", LIMIT)  # from now on Redis has the script
        before = redis.count_scripts()
        for _ in range(300):
            assert await refused(one, "a", LIMIT) is None
        assert redis.count_scripts() - before == 1
        await one.maintain()
        assert redis.count_scripts() - before == 3  # renewals of both tenants
        with ExitStack() as stack:
            for place in await asyncio.gather(*(one.acquire_permit("b", LIMIT) for _ in range(LIMIT))):
                stack.enter_context(place)
            assert redis.count_scripts() - before <= 5


@pytest.mark.parametrize(("holder", "asks"), [("one", 0), ("two", 1)])
async def test_store_is_not_queried_per_refusal(holder: str, asks: int, redis: RedisServer) -> None:
    """The clock stands still. No query is sent if this activator holds the permits itself."""
    async with asyncio.timeout(60), open_store(redis.url, "one", 20.0) as store, over(redis, "two") as two:
        one = SharedConcurrencyLimiter(store, Clock())
        with await {"one": one, "two": two}[holder].acquire_permit("a", 1):
            before = redis.count_scripts()
            for _ in range(100):
                assert await refused(one, "a", 1) is not None
            assert redis.count_scripts() - before == asks
        await one.close()


async def test_renewal_refuses_nobody_while_places_are_free(redis: RedisServer) -> None:
    """The clock stands still. A renewal returns unused permits, and a request that comes meanwhile leases more."""
    async with asyncio.timeout(60), open_store(redis.url, "one", 20.0) as store:
        one = SharedConcurrencyLimiter(store, Clock())
        assert await refused(one, "a", LIMIT) is None
        await one.maintain()
        assert (await asyncio.gather(one.maintain(), refused(one, "a", LIMIT)))[1] is None
        with await one.acquire_permit("a", LIMIT), await one.acquire_permit("a", LIMIT):
            for _ in range(2):
                await one.maintain()
                assert await refused(one, "a", LIMIT) is None
        await one.close()


async def test_a_lowered_limit_holds_for_all_together(redis: RedisServer) -> None:
    """Two busy activators return the permits leased of the old limit, though they used them a moment ago."""
    async with over(redis) as one, over(redis, "two") as two:
        with ExitStack() as stack:
            for concurrency_limiter in (one, two):
                for _ in range(3):
                    stack.enter_context(await concurrency_limiter.acquire_permit("a", 10))
                assert await refused(concurrency_limiter, "a", 10) is None
            for concurrency_limiter in (one, two):
                await refused(concurrency_limiter, "a", 5)
                await concurrency_limiter.maintain()
            for concurrency_limiter in (one, two):
                assert await refused(concurrency_limiter, "a", 5) is not None


async def test_silent_activator_loses_its_permits(redis: RedisServer) -> None:
    """Its permits are free after the lease's time, not before. An activator that shuts down returns them at once."""
    async with asyncio.timeout(60), open_store(redis.url, "one", 20.0) as store:
        one = SharedConcurrencyLimiter(store, terms=replace(PERMITS, leased_s=0.5))
        with await one.acquire_permit("a", 1):
            async with over(redis, "two") as two:
                assert int(redis.ask("PTTL", "kelvin:{a}:places")[1:]) <= 500
                await settled(two, "a", 1)
            async with over(redis, "three") as three:
                with await three.acquire_permit("a", 1):
                    assert await refused(three, "a", 1) is not None
        await one.close()
        assert redis.ask("KEYS", "*places").startswith(b"*0")


@pytest.mark.parametrize("fault", ["killed", "paused"])
async def test_concurrency_falls_back_to_a_share_without_redis(fault: str, redis: RedisServer) -> None:
    """The lease is used until its time is over, then this activator's share. No request waits for Redis twice. When
    Redis is back it learns which permits are in use.
    """

    clock = Clock()
    async with asyncio.timeout(60), open_store(redis.url, "one", 2.0) as store, over(redis, "two") as two:
        one = SharedConcurrencyLimiter(store, clock)
        await store.send_heartbeat()
        assert store.member_count == 2
        with ExitStack() as stack:
            stack.enter_context(await one.acquire_permit("a", 6))  # leases two
            redis.kill() if fault == "killed" else redis.pause()
            stack.enter_context(await one.acquire_permit("a", 6))
            assert await refused(one, "a", 6) is not None
            assert not is_up(store)
            clock.now_s += PERMITS.usable_s
            stack.enter_context(await one.acquire_permit("a", 6))
            commands = store.commands
            assert await refused(one, "a", 6) is not None
            assert store.commands == commands
            redis.start() if fault == "killed" else redis.resume()
            await wait_until_up(store)
            clock.now_s += 1
            await one.maintain()
            places = await asyncio.gather(*(two.acquire_permit("a", 6) for _ in range(3)))
            for place in places:
                stack.enter_context(place)
            assert await refused(two, "a", 6) is not None
        await one.close()


async def test_places_of_a_dead_member_come_back_after_a_clock_step(redis: RedisServer) -> None:
    """A lease that seems to end in an hour is shortened to the usual time."""
    async with over(redis) as one:
        redis.ask("HSET", "kelvin:{a}:places", "dead", f"'3 {redis.now_s() + 3600}'")
        with await one.acquire_permit("a", 5), await one.acquire_permit("a", 5):
            assert await refused(one, "a", 5) is not None
        ends = redis.ask("HGET", "kelvin:{a}:places", "dead").split(b" ")[-1]
        assert float(ends) <= redis.now_s() + PERMITS.leased_s + 1


async def test_an_activator_leases_its_places(tmp_path: Path, redis: RedisServer) -> None:
    """While another activator has the only permit, requests get 429. The activator ends cleanly."""
    async with world(tmp_path, redis=redis.url) as here, over(redis, "other") as other:
        await here.replica("a")
        await here.limit(requests=1)
        with await other.acquire_permit("default", 1):
            got = await here.post()
            assert (got.status, got.code) == (429, "tenant_busy")
        await other.close()
        async with asyncio.timeout(30):
            while (got := await here.post()).status == 429:
                await asyncio.sleep(0.05)
        assert got.status == 200
        assert await here.terminate() == 0
        assert redis.ask("KEYS", "*places").startswith(b"*0")
