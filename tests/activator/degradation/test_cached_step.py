"""The ladder's step of old answers, over TLS: whose they are, of which requests, and what is said of them."""

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
from activator.answers.response_cache import CacheableRequest, SealedAnswerStore
from activator.upstream.background_tasks import BackgroundTasks
from kelvin.contracts.serving.degradation_steps import Cached, CapOutput
from tests.activator.answers.idempotent_calls import ASK, same
from tests.activator.control import OTHER, STRANGER
from tests.activator.degradation.test_degradation import NEVER, SMALL, TOLD, full, row, set_ladder, small
from tests.activator.replica import FakeReplica, hello, silent
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world

GREEDY = CHAT | {"temperature": 0}
OLD = Cached(age_s=3600)


@asynccontextmanager
async def crowded(here: ActivatorWorld, replica: FakeReplica) -> AsyncIterator[None]:
    """Every slot is taken, and the queue is full."""
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
    """Whether it is, as if nothing were kept."""
    got = await here.post(body=body, **more)
    return (got.status, TOLD in got.headers) == (503, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_old_answer_replaces_a_refusal(tmp_path: Path, stream: bool) -> None:
    """The same bytes, said to be old, at no charge; of nothing that differs in anything, nor for who forbids it."""
    body = GREEDY | {"stream": stream}

    async with world(tmp_path, queue_requests=1) as here:
        replica = await here.replica("a", max_streams=1)
        unkept = await here.post(body=body)
        await set_ladder(here, OLD)
        async with crowded(here, replica):
            assert await refused(here, body), "nothing was kept before there was a ladder"
        first = await here.post(body=body)
        assert TOLD not in first.headers
        async with crowded(here, replica):
            got = await here.post(body=body)
            assert same(got, first)
            assert (got.status, got.headers[TOLD]) == (200, "cached")
            assert got.headers["age"].isdigit()
            assert got.headers["x-kelvin-repeat-of"] == first.headers["x-request-id"]
            assert got.headers["x-kelvin-version"] == unkept.headers["x-kelvin-version"]
            keyed = await here.post(body=body, **ASK)
            assert same(keyed, first)
            assert await refused(here, body, **NEVER)
            assert await refused(here, body | {"seed": 1})
            assert await refused(here, body | {"temperature": 1})
            await set_ladder(here)
            assert await refused(here, body)
        records = {each.request_id: each for each in await here.control.wait_for_records(10)}
        record = records[got.headers["x-request-id"]]
        assert (record.outcome, record.status, record.model) == ("cached", 200, "m")
        assert (record.prompt_tokens, record.completion_tokens, record.runtime_id) == (0, 0, None)
        assert str(record.degraded) == f"cached={got.headers['age']}"
        assert await here.metric_value("kelvin_degraded_total", step="cached") == 2


async def test_fallback_releases_the_first_reservation(tmp_path: Path) -> None:
    """Of its tenant's tokens a minute: what the model that was asked might have taken is given back for the other."""

    async with full(tmp_path) as (here, _):
        await small(here)
        await set_ladder(here, SMALL)
        await here.limit(tpm=2500)  # each may take 1040 or so, and one waits
        waiting = asyncio.create_task(here.post(body=CHAT | {"model": f"m@{OTHER[:12]}"}))
        await here.wait_for_queued(2)
        for _ in range(3):
            assert (await here.post()).headers[TOLD] == "fallback=small"
        waiting.cancel()
        await asyncio.wait((waiting,))


async def test_old_answer_is_private_to_its_tenant(tmp_path: Path) -> None:
    """The same model, version, path and body, byte for byte: a guest has its own, or none."""

    async with world(tmp_path, queue_requests=1) as here:
        replica = await here.replica("a", max_streams=1)
        await set_ladder(here, OLD, grantees=("stranger",))

        async def ask(key: str) -> ReceivedResponse:
            return await here.post("/default/m/v1/chat/completions", GREEDY, key)

        assert (await here.post("/default/m/v1/chat/completions", GREEDY)).status == 200
        async with crowded(here, replica):
            assert (await ask(STRANGER)).status == 503
            assert (await here.post("/default/m/v1/chat/completions", GREEDY)).headers[TOLD] == "cached"
        own = await ask(STRANGER)
        async with crowded(here, replica):
            theirs = await ask(STRANGER)
        assert theirs.headers["x-kelvin-repeat-of"] == own.headers["x-request-id"]


async def test_degraded_response_is_not_kept(tmp_path: Path) -> None:
    """An answer that a step made is not what was asked; nobody gets it again."""

    async with world(tmp_path, queue_tokens=60) as here:
        replica = await here.replica("a", max_streams=1)
        await set_ladder(here, CapOutput(tokens=1), OLD)
        replica.script = silent
        holder = asyncio.create_task(here.post())
        await replica.until(lambda r: r.running == 1)
        waiting = asyncio.create_task(here.post(body=GREEDY))
        await here.wait_for_queued(1)
        replica.script = hello
        holder.cancel()
        assert (await waiting).headers[TOLD] == "cap-output=1"
        await here.publish(models=(row("m", OLD),))
        replica.script = silent
        holder = asyncio.create_task(here.post())
        await replica.until(lambda r: r.running == 1)
        assert await refused(here)
        holder.cancel()
        await asyncio.wait((holder,))


async def test_old_answer_has_a_maximum_age() -> None:
    """To the second that the step names; then it is as if there were none."""
    now_s = 0.0
    what = derive_answer_key(b"s" * 32, "acme", None, [b"x"])
    nobody: Any = None  # is not answered

    limits, background_tasks = AnswerStoreLimits(ttl_s=100), BackgroundTasks()
    answers = SealedAnswerStore(b"s" * 32, limits, LocalAnswerStore(limits, lambda: now_s), background_tasks)
    answers.put(what, StoredResponse("req_1", 200, [], b"hello"))
    await background_tasks.close()
    now_s = 10.5
    assert not await CacheableRequest(answers, what).try_old_answer(nobody, nobody, 10)
    with pytest.raises(AttributeError):  # the control: it would be
        await CacheableRequest(answers, what).try_old_answer(nobody, nobody, 11)


async def test_answer_without_capacity_counts_as_missing() -> None:
    """Slow clients hold all memory for cached answers: the next step, or a replica, serves the request."""
    what = derive_answer_key(b"s" * 32, "acme", None, [b"x"])
    limits, background_tasks = AnswerStoreLimits(), BackgroundTasks()
    answers = SealedAnswerStore(b"s" * 32, limits, LocalAnswerStore(limits), background_tasks)
    answers.put(what, StoredResponse("req_1", 200, [], b"hello"))
    await background_tasks.close()
    request: Any = SimpleNamespace(account=SimpleNamespace(principal=SimpleNamespace(tenant="acme")))
    recorded: list[bytes] = []
    exchange: Any = SimpleNamespace(tap_response=lambda _, headers: recorded.extend(value for _, value in headers))
    unused: Any = None
    hits: list[bool] = []
    cached = CacheableRequest(answers, what, hits.append)
    with answers.capacity.take("other", limits.nbytes):
        assert not await cached.try_old_answer(request, unused, 10)
        assert not await cached.try_answer(exchange, request, unused)
    assert (hits, recorded) == ([False], [b"miss"])
    with pytest.raises(AttributeError):  # the control: with capacity it would be answered
        await cached.try_old_answer(request, unused, 10)


def test_degradation_policy_round_trips_through_the_feed() -> None:
    """Each step keeps its kind and its values."""
    rungs = row("m", CapOutput(tokens=3, wait_s=1), OLD)
    assert msgspec.json.decode(msgspec.json.encode(rungs), type=type(rungs)) == rungs
