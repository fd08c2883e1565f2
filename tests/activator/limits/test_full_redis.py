"""A real Redis that is full of foreign keys, or refuses writes for another reason: which scripts still work."""

from typing import Final

import pytest

from activator.answers import redis_answer_store
from activator.answers.idempotency_policy import ENTRY_BYTES
from activator.limits import leased_quotas, redis_rate_counter, redis_store
from activator.limits.redis_store import RedisStore, open_store
from activator.limits.store_errors import StoreFull, StoreUnavailable
from tests.activator.redis_server import RedisServer

KEEP: Final = (b"", b"fingerprint", b"sealed", 60_000, "name", ENTRY_BYTES, 3, 1 << 20, "kelvin:{a}:once:")

# script, keys, arguments; each creates its key
CONTROL: Final = {
    "rate": (redis_rate_counter.TAKE, ("kelvin:{a}:requests",), (60, 0, 1, 1)),
    "beat": (redis_store.HEARTBEAT, (redis_store.MEMBERS,), ("one", 5)),
    "places": (leased_quotas.LEASE, ("kelvin:{a}:places",), ("one", 0, 1, 1, 1, "5.0")),
    "budget": (leased_quotas.LEASE, ("kelvin:{a}:budget:2026-11",), ("one", 1, 0, 1, 1, "60.0")),
    "idempotency claim": (redis_answer_store.CLAIM, ("kelvin:{a}:once:b",), (b"token", b"fingerprint", 10_000)),
    "claim that was lost": (redis_answer_store.RENEW, ("kelvin:{a}:once:c",), (b"token", b"fingerprint", 10_000)),
}


def _fill(server: RedisServer) -> None:
    """Fill the allowed memory with foreign keys."""
    used = int(server.ask("INFO", "memory").partition(b"used_memory:")[2].split()[0])
    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.ask("CONFIG", "SET", "maxmemory", str(used + (4 << 20)))
    server.ask("SETRANGE", "foreign", str(8 << 20), "x")
    assert server.ask("SET", "x", "y").startswith(b"-OOM")


@pytest.mark.parametrize("name", CONTROL)
async def test_full_redis_runs_control_scripts(name: str, redis: RedisServer) -> None:
    """Limits, budgets, claims and members work in a full Redis, for a new key and one that exists."""

    script, keys, arguments = CONTROL[name]
    async with open_store(redis.url, "one") as store:
        _fill(redis)
        redis.ask("DEL", *keys)
        for _ in range(2):
            await store.run_script(script, keys, *arguments)
            assert redis.ask("EXISTS", keys[0]) == b":1"
        assert store.is_up


async def test_full_redis_stays_connected_and_keeps_no_answers(redis: RedisServer) -> None:
    """Beats continue, so limits stay shared. An answer is refused as too large, which does not count as an outage."""
    async with open_store(redis.url, "one") as store:
        _fill(redis)
        await store.send_heartbeat()
        assert store.is_up
        with pytest.raises(StoreFull):
            await store.run_storing_script(redis_answer_store.PUBLISH, ("a", "b", "c"), ENTRY_BYTES, *KEEP)
        assert store.is_up
        assert store.write_refusal is None


def _state(store: RedisStore) -> tuple[bool, str | None]:
    return store.is_up, store.write_refusal


async def test_read_only_redis_is_away_for_a_named_reason(caplog: pytest.LogCaptureFixture, redis: RedisServer) -> None:
    """A Redis that refuses writes can't count, so limits fall back to shares. Log and metric name the reason."""
    async with open_store(redis.url, "one") as store:
        redis.ask("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable):
            await store.run_script(redis_rate_counter.TAKE, ("kelvin:{a}:requests",), 60, 0, 1, 1)
        assert _state(store) == (False, "READONLY")
        assert "redis refuses writes (READONLY)" in caplog.text
        redis.ask("REPLICAOF", "NO", "ONE")
        await store.send_heartbeat()
        assert _state(store) == (True, None)
        redis.kill()
        await store.send_heartbeat()
        assert _state(store) == (False, None)
