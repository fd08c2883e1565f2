"""Where cached answers are stored: in this process, or in one real Redis that several activators share."""

import asyncio
from pathlib import Path

import pytest

from activator.answers.answer_store import LocalAnswerStore
from activator.answers.idempotency_policy import ENTRY_BYTES, AnswerKey, AnswerStoreLimits, derive_answer_key
from activator.answers.idempotency_secret import StoredResponse
from activator.answers.redis_answer_store import RedisAnswerStore
from activator.answers.response_cache import ResponseStore
from activator.limits.redis_store import open_store
from activator.upstream.background_tasks import BackgroundTasks
from tests.activator.answers.idempotent_calls import pair, same
from tests.activator.answers.test_redis_answer_store import EACH, Opened, until
from tests.activator.answers.test_response_cache import ALLOW, GREEDY
from tests.activator.redis_server import RedisServer, wait_until_up
from tests.activator.world import ActivatorWorld, ReceivedResponse

LIMITS = AnswerStoreLimits(ttl_s=300.0, answer_bytes=10, tenant_answers=3, tenant_bytes=4 * ENTRY_BYTES)


def cache_key(request_body: str, tenant: str = "acme") -> AnswerKey:
    return derive_answer_key(b"s" * 32, tenant, None, [request_body.encode()])


@EACH
async def test_cached_answer_opens_only_for_its_tenant(opened: Opened) -> None:
    """Stored bytes are sealed. An answer sealed with another secret, or one that is too large, is a miss."""
    async with opened(LIMITS) as kept:
        background_tasks = BackgroundTasks()
        ours, theirs = (ResponseStore(secret * 32, LIMITS, kept, background_tasks) for secret in (b"s", b"t"))
        answer = StoredResponse("req_1", 200, [], b"hello")
        ours.store_soon(cache_key("x"), answer)
        await background_tasks.close()
        found = await ours.find(cache_key("x"))
        assert found is not None
        assert found.content == answer
        lies = await kept.find(cache_key("x"))
        assert lies is not None
        assert b"hello" not in lies.sealed
        assert await theirs.find(cache_key("x")) is None
        ours.store_soon(cache_key("y"), StoredResponse("req_1", 200, [], b"x" * 11))
        await background_tasks.close()
        assert await ours.find(cache_key("y")) is None


async def test_cached_answer_reports_its_age() -> None:
    """The age counts from the publication until the TTL."""

    now_s = 0.0
    kept = LocalAnswerStore(AnswerStoreLimits(ttl_s=5), lambda: now_s)
    await kept.publish(cache_key("x"), None, b"sealed")
    for now_s in (0.0, 3.0):
        found = await kept.find(cache_key("x"))
        assert found is not None
        assert found.age_s == now_s
    now_s = 5.0
    assert await kept.find(cache_key("x")) is None


@pytest.mark.parametrize("outage", ["kill", "pause"])
async def test_without_redis_nothing_is_found(outage: str, redis: RedisServer) -> None:
    """An activator that knows Redis is down sends it no commands. A Redis that only hung still has its answers."""
    async with asyncio.timeout(120), open_store(redis.url, "one", response_timeout_s=2.0) as store:
        kept = RedisAnswerStore(store, "cache", LIMITS)
        await kept.publish(cache_key("1"), None, b"sealed")
        await until(kept, cache_key("1"), b"sealed")
        getattr(redis, outage)()
        assert await kept.find(cache_key("1")) is None
        assert not store.is_up
        asked_before = store.commands
        assert await kept.find(cache_key("1")) is None
        await kept.publish(cache_key("2"), None, b"sealed")
        assert store.commands == asked_before
        if outage == "kill":
            redis.start()
        else:
            redis.resume()
        await wait_until_up(store)
        await until(kept, cache_key("1"), None if outage == "kill" else b"sealed")
        assert await kept.find(cache_key("2")) is None
        await kept.publish(cache_key("2"), None, b"sealed")
        await until(kept, cache_key("2"), b"sealed")


async def test_two_activators_have_one_cache(tmp_path: Path, redis: RedisServer) -> None:
    """An answer cached by one activator is a hit at the other, byte for byte. Without Redis each runs the request."""

    async def until_hit(here: ActivatorWorld, body: object) -> ReceivedResponse:
        async with asyncio.timeout(60):
            while (got := await here.post(body=body, **ALLOW)).headers["x-kelvin-cache"] != "hit":
                assert got.status == 200
        return got

    async with pair(tmp_path, redis) as (here, there):
        for each in (here, there):
            await each.replica("a")
        bodies = [GREEDY | {"stream": is_stream} for is_stream in (False, True)]
        for body in bodies:
            first = await here.post(body=body, **ALLOW)
            assert first.headers["x-kelvin-cache"] == "miss"
            again = await until_hit(there, body)
            # otherwise it ran before the first answer was stored
            if again.headers["x-kelvin-repeat-of"] == first.headers["x-request-id"]:
                assert same(first, again)
        async with asyncio.timeout(60):
            while not same(await until_hit(here, bodies[0]), await until_hit(there, bodies[0])):
                pass  # a concurrent run may have replaced the stored answer
        redis.kill()
        alone = [await each.post(body=bodies[0], **ALLOW) for each in (here, there) for _ in range(2)]
        assert [(got.status, got.headers["x-kelvin-cache"]) for got in alone] == [(200, "miss")] * 4
