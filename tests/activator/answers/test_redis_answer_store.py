"""Several activators over one real Redis: one of them runs a key and all get its answer. Redis may also be down."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from activator.answers.answer_store import MAINTAIN_S, AnswerStore, Claimed, ClaimedElsewhere, LocalAnswerStore
from activator.answers.idempotency_policy import (
    ENTRY_BYTES,
    AnswerKey,
    AnswerStoreLimits,
    KeptAnswer,
    derive_answer_key,
)
from activator.answers.redis_answer_store import LEASE_S, RENEW, RETRY_S, RedisAnswerStore
from activator.limits.leased_quotas import SharedConcurrencyLimiter
from activator.limits.redis_rate_counter import RedisRateCounter
from activator.limits.redis_store import RedisStore, open_store
from tests.activator.answers.idempotent_calls import ASK, pair, same
from tests.activator.redis_server import RedisServer
from tests.activator.replica import halves, hello
from tests.activator.world import CHAT

LIMITS = AnswerStoreLimits(tenant_answers=3, tenant_bytes=4 * ENTRY_BYTES)


def ask(key: str, tenant: str = "acme", body: bytes = b"x") -> AnswerKey:
    return derive_answer_key(b"s" * 32, tenant, key.encode(), [body])


@asynccontextmanager
async def member(
    server: RedisServer, name: str = "one", lease_s: float = 60.0, limits: AnswerStoreLimits = LIMITS
) -> AsyncIterator[tuple[RedisAnswerStore, LocalAnswerStore, RedisStore]]:
    async with asyncio.timeout(120), open_store(server.url, name) as store:
        own = LocalAnswerStore(limits)
        yield RedisAnswerStore(store, "once", limits, own, lease_s), own, store


@asynccontextmanager
async def _own(limits: AnswerStoreLimits) -> AsyncIterator[AnswerStore]:
    yield LocalAnswerStore(limits)


@asynccontextmanager
async def _shared(limits: AnswerStoreLimits) -> AsyncIterator[AnswerStore]:
    with RedisServer() as server:
        async with asyncio.timeout(120), open_store(server.url, "one", response_timeout_s=30.0) as store:
            yield RedisAnswerStore(store, "cache", limits)


@asynccontextmanager
async def _with_own(limits: AnswerStoreLimits) -> AsyncIterator[AnswerStore]:
    with RedisServer() as server:
        async with member(server, limits=limits) as (answers, _, _):
            yield answers


Opened = Callable[[AnswerStoreLimits], AbstractAsyncContextManager[AnswerStore]]
EACH = pytest.mark.parametrize(
    "opened",
    [
        pytest.param(_own, id="in process"),
        pytest.param(_shared, id="in a Redis"),
        pytest.param(_with_own, id="in a Redis and in process"),
    ],
)


@EACH
async def test_answer_stores_share_claim_semantics(opened: Opened) -> None:
    """A claim is exclusive until its answer is published or released. A tenant keeps its latest answers by number and
    bytes. An answer that is too large is not stored.
    """
    async with opened(LIMITS) as answers:
        first = await answers.claim(ask("1"))
        assert isinstance(first, Claimed)
        assert await answers.find(ask("1")) is None
        await answers.publish(ask("1"), first, b"\x00sealed")
        assert await answers.claim(ask("1", body=b"y")) == KeptAnswer(ask("1").fingerprint, b"\x00sealed")
        assert isinstance(await answers.claim(ask("1", tenant="other")), Claimed)
        released = await answers.claim(ask("2"))
        assert isinstance(released, Claimed)
        await answers.release(ask("2"), released)
        for number in range(2, 6):
            mine = await answers.claim(ask(str(number)))
            assert isinstance(mine, Claimed)
            await answers.publish(ask(str(number)), mine, b"%d" % number)
        found = [await answers.claim(ask(str(number))) for number in range(1, 6)]
        assert [isinstance(each, KeptAnswer) for each in found] == [False, False, True, True, True]
        large = await answers.claim(ask("large"))
        assert isinstance(large, Claimed)
        await answers.publish(ask("large"), large, b"x" * LIMITS.tenant_bytes)
        assert isinstance(await answers.claim(ask("large")), Claimed)
        half = await answers.claim(ask("half"))
        assert isinstance(half, Claimed)
        await answers.publish(ask("half"), half, b"x" * ENTRY_BYTES)
        found = [await answers.claim(ask(name)) for name in ("3", "4", "5", "half")]
        assert [isinstance(each, KeptAnswer) for each in found] == [False, False, True, True]


@EACH
async def test_answer_stores_publish_without_a_claim(opened: Opened) -> None:
    """An answer is found with its bytes and age, by its own tenant only. A tenant keeps its latest answers by number
    and bytes. An answer that is too large evicts nothing.
    """
    async with opened(LIMITS) as answers:
        assert await answers.find(ask("1")) is None
        await answers.publish(ask("1"), None, b"\x00sealed")
        found = await answers.find(ask("1"))
        assert found == KeptAnswer(ask("1").fingerprint, b"\x00sealed")
        assert 0 <= found.age_s < LIMITS.ttl_s
        assert await answers.find(ask("1", "other")) is None
        await answers.publish(ask("1", "other"), None, b"another")
        await answers.publish(ask("1"), None, b"anew")
        assert await answers.find(ask("1")) == KeptAnswer(ask("1").fingerprint, b"anew")
        for number in range(2, 5):
            await answers.publish(ask(str(number)), None, b"%d" % number)
        found_all = [await answers.find(ask(str(number))) for number in range(1, 5)]
        assert [each is not None for each in found_all] == [False, True, True, True]
        await answers.publish(ask("large"), None, b"x" * LIMITS.tenant_bytes)
        await answers.publish(ask("half"), None, b"x" * ENTRY_BYTES)
        assert await answers.find(ask("large")) is None
        names = [await answers.find(ask(name)) for name in ("2", "3", "4", "half")]
        assert [each is not None for each in names] == [False, False, True, True]
        assert await answers.find(ask("1", "other")) == KeptAnswer(ask("1", "other").fingerprint, b"another")


@EACH
async def test_stored_answer_expires(opened: Opened) -> None:
    """After the TTL the answer is gone. After `maintain` its bytes are freed."""
    async with opened(AnswerStoreLimits(ttl_s=2.0)) as answers:
        await answers.publish(ask("1"), None, b"sealed")
        await until(answers, ask("1"), None)
        await answers.maintain()
        assert answers.nbytes == 0


async def until(answers: AnswerStore, what: AnswerKey, sealed: bytes | None) -> None:
    """Wait until `find` returns these sealed bytes, or nothing."""
    async with asyncio.timeout(30):
        while (None if (found := await answers.find(what)) is None else found.sealed) != sealed:
            await asyncio.sleep(0.005)


async def test_one_activator_runs_a_claimed_key(redis: RedisServer) -> None:
    """Other activators get the key's fingerprint and a retry time, and can't release or publish it. After a release
    another one may run it.
    """
    async with member(redis) as (one, _, _), member(redis, "two") as (two, _, _):
        mine = await one.claim(ask("k"))
        assert isinstance(mine, Claimed)
        assert await two.claim(ask("k", body=b"y")) == ClaimedElsewhere(ask("k").fingerprint, RETRY_S)
        await two.release(ask("k"), Claimed(b"not mine"))
        await two.publish(ask("k"), Claimed(b"not mine"), b"forged")
        assert isinstance(await two.claim(ask("k")), ClaimedElsewhere)
        await one.release(ask("k"), mine)
        theirs = await two.claim(ask("k"))
        assert isinstance(theirs, Claimed)
        await two.publish(ask("k"), theirs, b"sealed")
        assert await one.claim(ask("k")) == KeptAnswer(ask("k").fingerprint, b"sealed")


async def test_a_claim_ends_unless_it_is_renewed(redis: RedisServer) -> None:
    """A renewed claim stays. An expired one is free, and its late answer doesn't replace another's claim."""
    async with member(redis, lease_s=2.0) as (one, _, _), member(redis, "two") as (two, _, _):
        mine = await one.claim(ask("k"))
        assert isinstance(mine, Claimed)
        await one.maintain()
        assert isinstance(await two.claim(ask("k")), ClaimedElsewhere)
        async with asyncio.timeout(30):
            while isinstance(theirs := await two.claim(ask("k")), ClaimedElsewhere):
                await asyncio.sleep(0.01)
        assert isinstance(theirs, Claimed)
        await one.publish(ask("k"), mine, b"late")
        assert isinstance(await one.claim(ask("k")), ClaimedElsewhere)


async def test_a_claim_outlives_the_data_of_redis(redis: RedisServer) -> None:
    """After Redis lost its data, the activator claims its key again, unless another one did. The holder publishes."""
    async with member(redis) as (one, _, _), member(redis, "two") as (two, _, _):
        mine = await one.claim(ask("k"))
        assert isinstance(mine, Claimed)
        redis.ask("FLUSHALL")
        await one.maintain()
        assert await two.claim(ask("k")) == ClaimedElsewhere(ask("k").fingerprint, RETRY_S)
        redis.ask("FLUSHALL")
        theirs = await two.claim(ask("k"))
        assert isinstance(theirs, Claimed)
        await one.maintain()
        await one.publish(ask("k"), mine, b"late")
        await two.publish(ask("k"), theirs, b"sealed")
        await one.maintain()
        assert await one.claim(ask("k")) == KeptAnswer(ask("k").fingerprint, b"sealed")


async def test_renewal_never_outlives_a_release(redis: RedisServer) -> None:
    """A release that reaches Redis before the renewal leaves the key free."""
    async with member(redis) as (one, _, store), member(redis, "two") as (two, _, _):
        mine = await one.claim(ask("k"))
        assert isinstance(mine, Claimed)
        ask_store, is_late = store.run_script, True

        async def late(script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> object:
            nonlocal is_late
            if script == RENEW and is_late:
                is_late = False
                await one.release(ask("k"), mine)
            return await ask_store(script, keys, *arguments)

        store.run_script = late  # type: ignore[method-assign]
        await one.maintain()
        assert not is_late
        assert isinstance(await two.claim(ask("k")), Claimed)


async def test_activators_claim_locally_without_redis(redis: RedisServer) -> None:
    """The claim is marked as local. An answer published meanwhile is found locally, also after Redis is back."""
    async with member(redis) as (one, _, store):
        redis.kill()
        alone = await one.claim(ask("k"))
        assert alone == Claimed(is_alone=True)
        assert not store.is_up
        await one.publish(ask("k"), Claimed(is_alone=True), b"sealed")
        await one.release(ask("other"), Claimed(b"token"))
        redis.start()
        await store.send_heartbeat()
        assert await one.claim(ask("k")) == KeptAnswer(ask("k").fingerprint, b"sealed")
        mine = await one.claim(ask("new"))
        assert isinstance(mine, Claimed)
        redis.kill()
        await one.publish(ask("new"), mine, b"here")
        assert await one.claim(ask("new")) == KeptAnswer(ask("new").fingerprint, b"here")


async def test_two_activators_charge_and_run_once(tmp_path: Path, redis: RedisServer) -> None:
    """A repeat at the other activator is 409 during the run, then the same bytes; another body is 422. Without Redis
    both run and say so.
    """
    async with pair(tmp_path, redis) as (here, there):
        held = halves()
        ours, theirs = await here.replica("a", held), await there.replica("b")
        running = asyncio.create_task(here.post(**ASK))
        await ours.until(lambda r: len(r.calls) == 1)
        refused = await there.post(**ASK)
        assert (refused.status, refused.code) == (409, "idempotency_key_in_use")
        assert refused.headers["retry-after"] == "2"
        assert (await there.post(body=CHAT | {"seed": 1}, **ASK)).status == 422
        held.release()
        first = await running
        again = await there.post(**ASK)
        assert same(first, again)
        assert again.headers["x-kelvin-repeat-of"] == first.headers["x-request-id"]
        assert theirs.calls == []
        assert "x-kelvin-idempotency" not in first.headers
        records = await there.control.wait_for_records(3)
        assert [(each.outcome, each.status) for each in records] == [
            ("idempotency_key_in_use", 409), ("idempotency_key_reused", 422), ("replayed", 200),
        ]  # fmt: skip
        redis.kill()
        ours.script = hello
        alone = [await each.post(**{"idempotency-key": "order-8"}) for each in (here, there)]
        assert [(got.status, got.headers.get("x-kelvin-idempotency")) for got in alone] == [(200, "local")] * 2
        one = (await here.control.wait_for_records(2))[1].once
        assert one == (await there.control.wait_for_records(4))[3].once, "both runs have one charge id"


async def _publish(answers: RedisAnswerStore, key: str, sealed: bytes = b"sealed") -> None:
    mine = await answers.claim(ask(key))
    assert isinstance(mine, Claimed)
    await answers.publish(ask(key), mine, sealed)


@pytest.mark.parametrize("evicted", ["sizes", "ends"])
async def test_eviction_of_a_list_wedges_nothing(evicted: str, redis: RedisServer) -> None:
    """After Redis evicted one of a tenant's two index lists, later answers are still published and found."""
    async with member(redis) as (answers, _, store):
        for number in range(3):
            await _publish(answers, str(number))
        redis.ask("DEL", f"kelvin:{{acme}}:once-{evicted}")
        for number in range(3, 9):
            await _publish(answers, str(number))
        assert store.is_up
        found = [await answers.claim(ask(str(number))) for number in range(6, 9)]
        assert all(isinstance(each, KeptAnswer) for each in found)


async def test_making_room_ends_no_claim(redis: RedisServer) -> None:
    """An evicted answer stays in its tenant's lists. A new claim of its key survives when the lists make room."""
    async with member(redis) as (one, _, _), member(redis, "two") as (two, _, _):
        for number in range(LIMITS.tenant_answers):
            await _publish(one, str(number))
        redis.ask("DEL", f"kelvin:{{acme}}:once:{ask('0').name.hex()}")
        assert isinstance(await one.claim(ask("0")), Claimed)
        await _publish(one, "more")
        assert isinstance(await two.claim(ask("0")), ClaimedElsewhere)


async def test_answers_are_kept_after_a_clock_step(redis: RedisServer) -> None:
    """Redis's clock stepped back by an hour. Old answers make room, though they seem to expire after the new one."""
    async with member(redis) as (answers, _, _):
        for number in range(LIMITS.tenant_answers):
            await _publish(answers, str(number))
            name = ask(str(number)).name.hex()
            redis.ask("ZINCRBY", "kelvin:{acme}:once-ends", str(3600 * 1_000_000), name)
        for name in ("new", "newer"):
            await _publish(answers, name)
        found = [await answers.find(ask(name)) for name in ("new", "newer")]
        assert None not in found
        old = [await answers.find(ask(str(number))) for number in range(LIMITS.tenant_answers)]
        assert sum(each is not None for each in old) == LIMITS.tenant_answers - len(found)


LARGE = AnswerStoreLimits(tenant_answers=10_000, tenant_bytes=1 << 30, nbytes=1 << 30)


async def test_answers_leave_room_for_limits(redis: RedisServer) -> None:
    """In a Redis without eviction, answers stop at a part of its memory. Limits keep counting, and each further answer
    is stored by its own activator.
    """
    used = int(redis.ask("INFO", "memory").partition(b"used_memory:")[2].split()[0])
    redis.ask("CONFIG", "SET", "maxmemory", str(used + (32 << 20)))
    redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    async with member(redis, limits=LARGE) as (answers, own, store):
        for number in range(64):
            await _publish(answers, str(number), b"x" * (1 << 20))
            if number % 8 == 0:
                await store.send_heartbeat()
        assert store.is_up
        assert (await RedisRateCounter(store, "requests").hold("acme", 60, 1)).wait_s is None
        with await SharedConcurrencyLimiter(store).acquire_permit("acme", 1):
            assert redis.ask("EXISTS", "kelvin:{acme}:requests", "kelvin:{acme}:places") == b":2"
        kept = [await answers.claim(ask(str(number))) for number in range(64)]
        assert all(isinstance(each, KeptAnswer) for each in kept)
        assert own.cache.nbytes > 0


async def test_redis_that_does_not_tell_its_memory_keeps_limits(redis: RedisServer) -> None:
    """Some accounts and proxies refuse INFO. The free memory is unknown, so answers are stored locally only."""
    redis.ask("ACL", "SETUSER", "default", "-info")
    async with member(redis) as (answers, own, store):
        await store.send_heartbeat()
        assert store.is_up
        with await SharedConcurrencyLimiter(store).acquire_permit("acme", 1):
            assert redis.ask("EXISTS", "kelvin:{acme}:places") == b":1"
        await _publish(answers, "1")
        assert own.cache.nbytes > 0
        assert store.is_up


class SlowStore:
    """A store that answers after 5 ms and finds nothing."""

    is_up = True

    async def run_script(
        self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int
    ) -> tuple[None, None, int]:
        await asyncio.sleep(0.005)
        return None, None, 0


@pytest.mark.virtual_time
async def test_many_claims_are_renewed_within_their_lease() -> None:
    """The claims of 4,096 concurrent requests are all renewed before they expire."""
    answers = RedisAnswerStore(cast(RedisStore, SlowStore()), "once", LIMITS)
    for number in range(4096):
        await answers.claim(ask(str(number)))
    clock = asyncio.get_running_loop().time
    began_s = clock()
    await answers.maintain()
    assert clock() - began_s + MAINTAIN_S < LEASE_S
