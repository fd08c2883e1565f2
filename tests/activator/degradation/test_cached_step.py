"""The degradation step that serves old answers, over TLS: for which requests and tenants, and how they are marked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from activator.answers.answer_store import LocalAnswerStore
from activator.answers.idempotency_policy import AnswerStoreLimits, derive_answer_key
from activator.answers.idempotency_secret import StoredResponse
from activator.answers.response_cache import CacheableRequest, ResponseStore
from activator.upstream.background_tasks import BackgroundTasks
from kelvin.contracts.serving.degradation_steps import Cached, CapOutput
from tests.activator.answers.idempotent_calls import ASK, same
from tests.activator.control import OTHER, STRANGER
from tests.activator.degradation.test_degradation import DEGRADED, NEVER, SMALL, full, row, set_degradation, small
from tests.activator.replica import FakeReplica, hello, silent
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world

GREEDY = CHAT | {"temperature": 0}
OLD = Cached(age_s=3600)


@asynccontextmanager
async def overloaded(here: ActivatorWorld, replica: FakeReplica) -> AsyncIterator[None]:
    """Take every slot of the replica and fill the queue."""
    replica.script = silent
    holder = asyncio.create_task(here.post())
    await replica.until(lambda r: r.running == 1)
    waiting = asyncio.create_task(here.post())
    await here.wait_for_queued(1)
    try:
        yield
    finally:
        replica.script = hello
        holder.cancel()
        await asyncio.wait((holder, waiting))


async def refused(here: ActivatorWorld, body: object = GREEDY, **more: str) -> bool:
    """Return whether the request gets 503 without a degradation header."""
    got = await here.post(body=body, **more)
    return (got.status, DEGRADED in got.headers) == (503, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_old_answer_replaces_a_refusal(tmp_path: Path, stream: bool) -> None:
    """The old answer has the same bytes, an `Age`, and no charge. A different request, or one that forbids degradation,
    is refused.
    """
    body = GREEDY | {"stream": stream}

    async with world(tmp_path, queue_requests=1) as here:
        replica = await here.replica("a", max_streams=1)
        unkept = await here.post(body=body)
        await set_degradation(here, OLD)
        async with overloaded(here, replica):
            assert await refused(here, body), "nothing was stored before the step was set"
        first = await here.post(body=body)
        assert DEGRADED not in first.headers
        async with overloaded(here, replica):
            got = await here.post(body=body)
            assert same(got, first)
            assert (got.status, got.headers[DEGRADED]) == (200, "cached")
            assert got.headers["age"].isdigit()
            assert got.headers["x-kelvin-repeat-of"] == first.headers["x-request-id"]
            assert got.headers["x-kelvin-version"] == unkept.headers["x-kelvin-version"]
            keyed = await here.post(body=body, **ASK)
            assert same(keyed, first)
            assert await refused(here, body, **NEVER)
            assert await refused(here, body | {"seed": 1})
            assert await refused(here, body | {"temperature": 1})
            await set_degradation(here)
            assert await refused(here, body)
        records = {each.request_id: each for each in await here.control.wait_for_records(10)}
        record = records[got.headers["x-request-id"]]
        assert (record.outcome, record.status, record.model) == ("cached", 200, "m")
        assert (record.prompt_tokens, record.completion_tokens, record.runtime_id) == (0, 0, None)
        assert str(record.degraded) == f"cached={got.headers['age']}"
        assert await here.metric_value("kelvin_degraded_total", step="cached") == 2


async def test_fallback_releases_the_first_reservation(tmp_path: Path) -> None:
    """The tokens reserved for the requested model are returned before the fallback reserves its own."""

    async with full(tmp_path) as (here, _):
        await small(here)
        await set_degradation(here, SMALL)
        await here.limit(tpm=2500)  # each request reserves about 1040 tokens, and one waits
        waiting = asyncio.create_task(here.post(body=CHAT | {"model": f"m@{OTHER[:12]}"}))
        await here.wait_for_queued(2)
        for _ in range(3):
            assert (await here.post()).headers[DEGRADED] == "fallback=small"
        waiting.cancel()
        await asyncio.wait((waiting,))


async def test_old_answer_is_private_to_its_tenant(tmp_path: Path) -> None:
    """Two tenants send the same request byte for byte. Each gets its own old answer, or none."""

    async with world(tmp_path, queue_requests=1) as here:
        replica = await here.replica("a", max_streams=1)
        await set_degradation(here, OLD, grantees=("stranger",))

        async def ask(key: str) -> ReceivedResponse:
            return await here.post("/default/m/v1/chat/completions", GREEDY, key)

        assert (await here.post("/default/m/v1/chat/completions", GREEDY)).status == 200
        async with overloaded(here, replica):
            assert (await ask(STRANGER)).status == 503
            assert (await here.post("/default/m/v1/chat/completions", GREEDY)).headers[DEGRADED] == "cached"
        own = await ask(STRANGER)
        async with overloaded(here, replica):
            theirs = await ask(STRANGER)
        assert theirs.headers["x-kelvin-repeat-of"] == own.headers["x-request-id"]


async def test_degraded_response_is_not_kept(tmp_path: Path) -> None:
    """An answer with a degradation step is not stored as an old answer."""

    async with world(tmp_path, queue_tokens=60) as here:
        replica = await here.replica("a", max_streams=1)
        await set_degradation(here, CapOutput(tokens=1), OLD)
        replica.script = silent
        holder = asyncio.create_task(here.post())
        await replica.until(lambda r: r.running == 1)
        waiting = asyncio.create_task(here.post(body=GREEDY))
        await here.wait_for_queued(1)
        replica.script = hello
        holder.cancel()
        assert (await waiting).headers[DEGRADED] == "cap-output=1"
        await here.publish(models=(row("m", OLD),))
        replica.script = silent
        holder = asyncio.create_task(here.post())
        await replica.until(lambda r: r.running == 1)
        assert await refused(here)
        holder.cancel()
        await asyncio.wait((holder,))


async def test_old_answer_has_a_maximum_age() -> None:
    """The answer is used up to the age of the step, to the second."""
    now_s = 0.0
    what = derive_answer_key(b"s" * 32, "acme", None, [b"x"])
    nobody: Any = None  # never used, because nothing is answered

    limits, background_tasks = AnswerStoreLimits(ttl_s=100), BackgroundTasks()
    answers = ResponseStore(b"s" * 32, limits, LocalAnswerStore(limits, lambda: now_s), background_tasks)
    answers.store_soon(what, StoredResponse("req_1", 200, [], b"hello"))
    await background_tasks.close()
    now_s = 10.5
    assert not await CacheableRequest(answers, what).try_old_answer(nobody, nobody, 10)
    with pytest.raises(AttributeError):  # control: a young answer would be sent
        await CacheableRequest(answers, what).try_old_answer(nobody, nobody, 11)


async def test_answer_without_capacity_counts_as_missing() -> None:
    """Slow clients hold all memory for cached answers: the next step, or a replica, serves the request."""
    what = derive_answer_key(b"s" * 32, "acme", None, [b"x"])
    limits, background_tasks = AnswerStoreLimits(), BackgroundTasks()
    answers = ResponseStore(b"s" * 32, limits, LocalAnswerStore(limits), background_tasks)
    answers.store_soon(what, StoredResponse("req_1", 200, [], b"hello"))
    await background_tasks.close()
    recorded: list[bytes] = []
    exchange = SimpleNamespace(tap_response=lambda _, headers: recorded.extend(value for _, value in headers))
    account = SimpleNamespace(principal=SimpleNamespace(tenant="acme"))
    request: Any = SimpleNamespace(account=account, exchange=exchange)
    unused: Any = None
    hits: list[bool] = []
    cached = CacheableRequest(answers, what, hits.append)
    with answers.capacity.hold("other", limits.nbytes):
        assert not await cached.try_old_answer(request, unused, 10)
        assert not await cached.try_answer(request, unused)
    assert (hits, recorded) == ([False], [b"miss"])
    with pytest.raises(AttributeError):  # the control: with capacity it would be answered
        await cached.try_old_answer(request, unused, 10)


def test_degradation_policy_round_trips_through_the_feed() -> None:
    """Each step keeps its kind and its values."""
    model_row = row("m", CapOutput(tokens=3, wait_s=1), OLD)
    assert msgspec.json.decode(msgspec.json.encode(model_row), type=type(model_row)) == model_row
