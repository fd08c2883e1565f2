"""Redis faults: cached answers fill it, foreign keys fill it, it is flushed, it dies. Shared limits live there."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from coldstart_bench.harness.installation import Installation, running_installation
from tests.activator.redis_server import RedisServer
from tests.attack.attacker import MIB, SETTINGS, Bystander, metric
from tests.e2e.https_client import Answer, all_at_once, ask
from tests.e2e.installation_state import is_recorded
from tests.e2e.tenants import Tenant, default_tenant, make_tenant
from tests.eventually import wait

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

ROOM_BYTES: Final = 2 * MIB  # above what an empty Redis uses
KEPT: Final = 240  # answers that the attacker has cached
TOKENS: Final = 120  # per answer, as a stream: about 30 KB, less where several tokens share an event
RPM: Final = 60
OTHERS: Final = 9  # activators that Redis knows of, besides the real one


@dataclass(frozen=True)
class Ground:
    """An installation with Redis, a tenant that fills it, and a tenant with a budget and limits."""

    up: Installation
    redis: RedisServer
    filler: Tenant
    limited: Tenant


@pytest.fixture(scope="module")
def ground(scratch: Path, tiny: Path) -> Iterator[Ground]:
    """An installation whose tenant `limited` has high limits; some of them live in Redis."""
    with RedisServer() as redis:
        settings = {**SETTINGS, "KELVIN_REDIS": redis.url}
        with running_installation(scratch / "redis", settings=settings) as up:
            limits = ("--budget-micros", "1000000000", "--tpm", "1000000", "--requests", "64")
            found = Ground(up, redis, make_tenant(up, "filler", scratch), make_tenant(up, "limited", scratch, *limits))
            for tenant in (found.filler, found.limited):
                assert tenant.push(tiny)["exit"] == 0
                assert tenant.complete().status == 200
            yield found


@pytest.fixture(autouse=True)
def _empty(ground: Ground) -> Iterator[None]:
    """Reset Redis before each test: it answers, has no memory limit and holds no foreign data."""
    ground.redis.ask("CONFIG SET maxmemory 0")
    ground.redis.ask("FLUSHALL")
    wait(lambda: b"kelvin:members" in ground.redis.ask("KEYS kelvin:members"), "the activator is there")
    yield
    ground.redis.ask("CONFIG SET maxmemory 0")


def _bound(redis: RedisServer, policy: str) -> None:
    used = next(
        int(line.partition(b":")[2])
        for line in redis.ask("INFO memory").splitlines()
        if line.startswith(b"used_memory:")
    )
    assert redis.ask(f"CONFIG SET maxmemory {used + ROOM_BYTES}") == b"+OK"
    assert redis.ask(f"CONFIG SET maxmemory-policy {policy}") == b"+OK"


def _fill(ground: Ground, name: str) -> list[Answer]:
    """Request KEPT answers, each with its own idempotency key, and return them."""

    def request_every_eighth(first: int) -> list[Answer]:
        body = {"model": "m", "prompt": "w1", "max_tokens": TOKENS, "temperature": 0, "stream": True}
        return [
            ground.filler.post("/v1/completions", body, {"idempotency-key": f"{name}-{number}"})
            for number in range(first, KEPT, 8)
        ]

    found = all_at_once(*[lambda first=first: request_every_eighth(first) for first in range(8)])
    return [answer for batch in found for answer in batch]


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_kept_answers_fill_redis(ground: Ground, policy: str) -> None:
    """A full Redis delays no one: it answers a ping within a second, and all requests of both tenants succeed."""
    _bound(ground.redis, policy)
    slow: list[float] = []
    ended = threading.Event()

    def ping() -> None:
        while not ended.wait(0.05):
            began = time.monotonic()
            assert ground.redis.ask("PING") == b"+PONG"
            slow.append(time.monotonic() - began)

    watcher = threading.Thread(target=ping)
    watcher.start()
    try:
        with Bystander(ground.limited.complete) as bystander:
            answers = _fill(ground, policy)
            bystander.wait_for(10)
    finally:
        ended.set()
        watcher.join()
    assert bystander.failures == []
    assert [answer.raw for answer in answers if answer.status != 200 or not answer.done] == []
    assert sum(len(answer.raw) for answer in answers) > ROOM_BYTES, "the attack is too small"
    assert slow
    assert max(slow) < 1


def test_foreign_keys_fill_redis(ground: Ground) -> None:
    """When foreign keys fill a Redis that evicts nothing, requests and keyed requests are answered.

    The activator registers itself again, and limits are still counted in Redis.
    """
    _bound(ground.redis, "noeviction")
    ground.redis.ask("SETRANGE", "foreign", str(2 * ROOM_BYTES), "x")
    assert ground.redis.ask("SET", "another", "x").startswith(b"-OOM"), "the attack is too small"
    ground.redis.ask("DEL", "kelvin:members")
    scripts = ground.redis.count_scripts()
    with Bystander(ground.limited.complete) as bystander:
        bystander.wait_for(10)
        body = {"model": "m", "prompt": "w1", "max_tokens": 4, "temperature": 0}
        assert ground.filler.post("/v1/completions", body, {"idempotency-key": "full"}).status == 200
        wait(lambda: ground.redis.ask("EXISTS kelvin:members") == b":1", "the activator is a member again")
        bystander.wait_for(10)
    assert bystander.failures == []
    assert ground.redis.count_scripts() > scripts + 5  # of twenty answers, several use one lease
    assert ground.redis.ask("EXISTS", f"kelvin:{{{ground.limited.name}}}:tokens") == b":1"


def test_flushed_redis(ground: Ground, scratch: Path, tiny: Path) -> None:
    """Each flush of Redis lets at most one more minute of a tenant's rate pass, and causes no other errors."""
    fast = make_tenant(ground.up, "fast", scratch, "--rpm", str(RPM))
    assert fast.push(tiny)["exit"] == 0
    statuses: list[int] = []
    is_over = threading.Event()

    def hammer() -> None:
        while not is_over.is_set():
            statuses.append(fast.complete(max_tokens=1).status)

    def wait_for(status: int) -> None:
        had = statuses.count(status)
        wait(lambda: statuses.count(status) > had, f"a request is answered {status}")

    def flush() -> None:
        try:
            wait_for(429)
            for _ in range(4):
                ground.redis.ask("FLUSHALL")
                wait_for(200)
                wait_for(429)
        finally:
            is_over.set()

    with Bystander(ground.limited.complete) as bystander:
        all_at_once(hammer, hammer, hammer, hammer, flush)
    assert bystander.failures == []
    assert set(statuses) == {200, 429}
    assert RPM <= statuses.count(200) <= 5 * RPM + RPM


def test_claims_of_a_flushed_redis(ground: Ground) -> None:
    """Redis is flushed while two requests with one key run: both are answered, and the bill has one request."""
    before = ground.filler.report()["requests"].get("ok", 0)
    body = {"model": "m", "prompt": "w1 w2", "max_tokens": 800, "temperature": 0}
    key = {"idempotency-key": f"flushed-{time.time_ns()}"}

    def repeat() -> Answer:
        limit = time.monotonic() + 60
        while (answer := ground.filler.post("/v1/completions", body, key)).status == 409:
            assert time.monotonic() < limit, "the retry hints never led to an answer"
            time.sleep(float(answer.headers["retry-after"]))
        return answer

    def flush() -> None:
        wait(lambda: b":once:" in ground.redis.ask("KEYS kelvin:*:once:*"), "the key is claimed")
        ground.redis.ask("FLUSHALL")

    first, second, _ = all_at_once(repeat, repeat, flush)
    assert [first.status, second.status, repeat().status] == [200] * 3
    wait(lambda: ground.filler.report()["requests"].get("ok", 0) > before, "the run is on the bill")
    # Records reach the bill in the order in which an activator writes them, so a second charge would precede this one.
    later = ground.filler.complete()
    wait(lambda: is_recorded(ground.up, later.headers["x-request-id"]), "a later request is on the bill")
    assert ground.filler.report()["requests"]["ok"] == before + 2


def test_retry_hint_above_a_share_is_reachable(ground: Ground, scratch: Path, tiny: Path) -> None:
    """With Redis down and ten known activators, a request above a tenth of its limit succeeds by its retry hints.

    Other requests are answered meanwhile.
    """
    large = make_tenant(ground.up, "large", scratch, "--tpm", "6000")
    assert large.push(tiny)["exit"] == 0

    def are_known() -> bool:
        for number in range(OTHERS):
            ground.redis.ask(f"ZADD kelvin:members {ground.redis.now_s()} other-{number}")
        return metric(ground.up, "kelvin_redis_members{") > OTHERS

    wait(are_known, "the activator knows of them")
    assert large.complete(max_tokens=1).status == 200
    ground.redis.kill()
    try:
        with Bystander(lambda: default_call(ground)) as bystander:
            limit, answers = time.monotonic() + 100, []
            while (answer := large.complete(max_tokens=700)).status != 200:
                answers.append(json.loads(answer.raw)["error"]["code"])
                assert time.monotonic() < limit, f"the retry hints never led to an answer: {answers}"
                assert answer.status == 429, answer.raw
                time.sleep(float(answer.headers["retry-after"]))
        assert bystander.failures == []
    finally:
        ground.redis.start()
        wait(lambda: b"kelvin:members" in ground.redis.ask("KEYS kelvin:members"), "the activator is back")


def default_call(ground: Ground) -> Answer:
    """List models as the operator, whose tenant has no limits."""
    operator = default_tenant(ground.up)
    return ask(ground.up, "GET", "/v1/models", operator.infer)
