"""Limits per minute of several activators over one real Redis: number of queries, the shared limit, and outages."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from activator.limits.policy.token_block import LEASE_S, QUIET_S, block_size
from activator.limits.redis_rate_counter import RedisRateCounter
from activator.limits.redis_store import RedisStore, open_store
from tests.activator.clock import Clock
from tests.activator.redis_server import RedisServer, is_up, wait_until_up
from tests.activator.world import world

LIMIT = 600


@dataclass
class Member:
    """One activator's counter. Its clock stands still unless it is set; Redis has its own."""

    store: RedisStore
    shared: RedisRateCounter
    clock: Clock

    async def take(self, units: int = 1, limit: int = LIMIT) -> float | None:
        """Use so many of tenant `a`'s units. Return the wait if they are refused."""
        found = await self.shared.hold("a", limit, units)
        if found.wait_s is None:
            self.shared.settle("a", limit, units, units)
        return found.wait_s

    async def take_all(self, most: int) -> int:
        """Return how many units can be used before the first refusal."""
        taken = 0
        while taken < most and await self.take() is None:
            taken += 1
        return taken


@asynccontextmanager
async def member(server: RedisServer, name: str = "one", answer_s: float = 20.0) -> AsyncIterator[Member]:
    """Yield one activator's counter. A busy machine may answer late, so only a paused Redis should count as down."""
    clock = Clock()
    async with asyncio.timeout(120), open_store(server.url, name, answer_s) as store:
        shared = RedisRateCounter(store, "requests", clock)
        yield Member(store, shared, clock)
        await shared.close()


async def test_one_request_in_ten_touches_redis(redis: RedisServer) -> None:
    """A tenant sends ten requests a second, below its limit and beyond it. Control: requests as large as a block query
    Redis each time.
    """
    async with member(redis) as one:
        before = redis.count_scripts()
        for _ in range(300):
            assert await one.take() is None
            one.clock.now_s += 0.1
        assert 0 < redis.count_scripts() - before <= 30
        await one.take_all(LIMIT)
        before = redis.count_scripts()
        for _ in range(300):
            await one.take()
            one.clock.now_s += 0.1
        assert redis.count_scripts() - before <= 31
        one.clock.now_s += QUIET_S
        before = redis.count_scripts()
        for _ in range(30):
            await one.shared.hold("b", 20_000, 1000)
        assert redis.count_scripts() - before >= 10


@pytest.mark.parametrize("shared", [pytest.param(True, id="one Redis"), pytest.param(False, id="control: two")])
async def test_two_activators_never_exceed_the_rate_limit(redis: RedisServer, shared: bool) -> None:
    """In any order they use a minute's worth and the refill, no more, because a block is taken before it is used.
    Unused units of a block are available to the other when its time is over.
    """
    with RedisServer() as other:
        async with member(redis) as one, member(redis if shared else other, "two") as two:
            began_s = time.monotonic()
            assert await two.take() is None  # two takes a block, and uses one unit of it
            used = 1 + await one.take_all(2 * LIMIT)
            used += await two.take_all(2 * LIMIT)
            for each in (one, two):
                each.clock.now_s += QUIET_S
            used += sum(await asyncio.gather(one.take_all(2 * LIMIT), two.take_all(2 * LIMIT)))
            flowed = (time.monotonic() - began_s) * LIMIT / 60
            assert (used <= LIMIT + flowed + 1) == shared
            assert used >= LIMIT - 2 * block_size(LIMIT)
            one.clock.now_s += QUIET_S + 60
            await one.shared.hold("b", LIMIT, 1)
            one.clock.now_s += LEASE_S
            await one.shared.maintain()
            assert repr(one.shared._blocks["b"]).startswith("TokenBlock(stock=1, held=1")
            assert float(redis.ask("PTTL", "kelvin:{b}:requests")[1:]) <= 100


async def test_actual_token_use_is_reported_to_redis(redis: RedisServer) -> None:
    """Units used beyond the held ones are owed to Redis. Unused ones are available here or at another activator."""
    async with member(redis) as one, member(redis, "two") as two:
        assert (await one.shared.hold("a", LIMIT, 500)).wait_s is None
        assert (await two.shared.hold("a", LIMIT, 200)).wait_s is not None
        one.shared.settle("a", LIMIT, 500, 0)
        one.clock.now_s += LEASE_S
        await one.shared.maintain()
        two.clock.now_s += QUIET_S
        assert (await two.shared.hold("a", LIMIT, 400)).wait_s is None
        two.shared.settle("a", LIMIT, 400, 1200)  # far more than was held: both wait for it
        two.clock.now_s += LEASE_S
        await two.shared.maintain()
        one.clock.now_s += LEASE_S
        refused = await one.shared.hold("a", LIMIT, 1)
        assert refused.wait_s is not None
        assert refused.remaining == 0


@pytest.mark.parametrize("fault", ["killed", "paused"])
async def test_rate_limit_falls_back_to_a_share_without_redis(fault: str, redis: RedisServer) -> None:
    """The block is used until its time is over, then this activator's share, which begins with one block. A request
    waits for Redis at most once. When Redis is back it learns what was used.
    """
    async with member(redis, answer_s=2.0) as one, member(redis, "two"):
        await one.store.send_heartbeat()
        assert one.store.member_count == 2
        assert await one.take() is None
        redis.kill() if fault == "killed" else redis.pause()
        block = block_size(LIMIT)
        assert [await one.take() for _ in range(block)] == [None] * block
        assert is_up(one.store)  # Redis was not queried
        alone = await one.take_all(LIMIT)
        assert not is_up(one.store)
        assert alone == block_size(LIMIT // 2)
        commands = one.store.commands
        assert await one.take() is not None
        assert one.store.commands == commands  # no request waits for Redis
        one.clock.now_s += 10.0
        assert await one.take_all(LIMIT) == LIMIT // 2 / 6
        redis.start() if fault == "killed" else redis.resume()
        await wait_until_up(one.store)
        one.clock.now_s += QUIET_S
        assert await one.take() is None
        left = (await one.shared.hold("a", LIMIT, 1)).remaining
        if fault == "killed":  # its data was lost, so only what was used meanwhile is known
            assert LIMIT - 70 <= left <= LIMIT - 40
        else:
            assert left < LIMIT - 40


async def test_rate_limit_works_if_redis_never_answers(caplog: pytest.LogCaptureFixture, redis: RedisServer) -> None:
    """It counts alone from the start and logs that once. Redis is used when it comes up."""
    redis.kill()
    async with member(redis) as one:
        assert not is_up(one.store)
        await one.store.send_heartbeat()
        assert caplog.text.count("redis does not answer") == 1
        assert await one.take_all(LIMIT) == block_size(LIMIT)
        redis.start()
        await wait_until_up(one.store)
        assert await one.take_all(LIMIT) >= LIMIT - 2 * block_size(LIMIT)


async def test_cancelled_request_leaves_nothing_held(redis: RedisServer) -> None:
    """A cancellation does not cut the running Redis command. Its units are available to the next request."""
    async with member(redis) as one:
        redis.pause()
        cancelled_request = asyncio.ensure_future(one.take(LIMIT))
        await asyncio.sleep(0)
        cancelled_request.cancel()
        redis.resume()
        with pytest.raises(asyncio.CancelledError):
            await cancelled_request
        assert await one.take(LIMIT) is None
        assert redis.ask("INFO", "clients").count(b"blocked_clients:0") == 1


async def test_idle_tenants_are_forgotten(redis: RedisServer) -> None:
    """A tenant is forgotten once its bucket is full. A tenant with held units is kept."""
    async with member(redis) as one:
        assert await one.take() is None
        await one.shared.hold("b", LIMIT, 1)
        one.clock.now_s += LEASE_S
        known = []
        for _ in range(2):
            await one.shared.maintain()
            known.append(repr(one.shared).split()[2])
            one.clock.now_s += 60.0
        assert known == ["tenants=2", "tenants=1"]


async def test_tenant_that_waits_is_not_forgotten(redis: RedisServer) -> None:
    """Redis does not answer, and blocks are tended before the waiting request continues. It can still settle."""
    async with member(redis, answer_s=0.1) as one:
        redis.pause()
        holding = asyncio.create_task(one.shared.hold("a", LIMIT, 3))
        while is_up(one.store):
            await asyncio.sleep(0)
        while not holding.done():
            await one.shared.maintain()
            await asyncio.sleep(0)
        assert (await holding).wait_s is None
        one.shared.settle("a", LIMIT, 3, 3)
        redis.resume()


async def test_keys_are_tagged_by_tenant_and_end_by_themselves(redis: RedisServer) -> None:
    """A bucket expires when it is full, members after twice their silence. A tenant's keys share a cluster slot."""
    async with member(redis) as one:
        await one.take(100)
        keys = redis.ask("KEYS", "*").decode().split("\r\n")[2::2]
        assert sorted(keys) == ["kelvin:members", "kelvin:{a}:requests"]
        assert all(0 < int(redis.ask("PTTL", key)[1:]) <= 60_000 for key in keys)


async def test_clock_of_redis_that_steps_back_locks_nobody_out(redis: RedisServer) -> None:
    """A bucket that seems to fill from an hour ahead lacks the same now, and refills from here."""
    async with member(redis) as one:
        redis.ask("SET", "kelvin:{a}:requests", f"'30.0 {redis.now_s() + 3600}'")
        assert await one.take_all(LIMIT) in range(LIMIT // 2, LIMIT // 2 + LIMIT // 10)


async def test_bucket_of_an_earlier_build_counts_as_full(redis: RedisServer) -> None:
    """It was a single number. A value that can't be parsed refuses no request."""
    async with member(redis) as one:
        redis.ask("SET", "kelvin:{a}:requests", "1790000000.5")
        assert await one.take() is None
        assert one.store.is_up


async def test_member_that_died_before_a_clock_step_counts_no_more(redis: RedisServer) -> None:
    """A member last seen an hour ahead of now is kept only as long as any silent one."""
    async with member(redis) as one:
        redis.ask("ZADD", "kelvin:members", str(redis.now_s() + 3600), "dead")
        await one.store.send_heartbeat()
        assert int(redis.ask("ZSCORE", "kelvin:members", "dead").split(b"\r\n")[1]) <= redis.now_s()


async def test_an_activator_counts_in_redis(tmp_path: Path, redis: RedisServer) -> None:
    """The next activator continues the count of the first, which returned its unused units. While Redis is down
    requests are served.
    """
    async with world(tmp_path, redis=redis.url) as here:
        await here.replica("a")
        await here.limit(rpm=20, tpm=100_000)
        began_s = time.monotonic()
        for _ in range(15):
            got = await here.post()
            assert got.status == 200
        assert int(got.headers["x-ratelimit-remaining-requests"]) <= 5 + (time.monotonic() - began_s) / 3 + 1
        assert await here.terminate() == 0
        await here.restart()
        await here.limit(rpm=20, tpm=100_000)
        served = 0
        while (got := await here.post()).status == 200:
            served += 1
        assert (got.status, got.code) == (429, "rate_limit_exceeded")
        assert served <= 5 + (time.monotonic() - began_s) / 3 + 1
        redis.kill()
        async with asyncio.timeout(60):
            while (await here.post()).status != 200:
                await asyncio.sleep(0.1)
        await here.wait_for_metric("kelvin_redis_connected", 0)
