"""Degradation over TLS: what a request gets instead of a refusal or a long wait, its header, and its usage record."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.serving.control_messages import ModelRow, Scope
from kelvin.contracts.serving.degradation_steps import CapOutput, DegradationStep, Fallback
from kelvin.contracts.serving.start_forecast import StartRow
from tests.activator.api.test_grants import NARROW
from tests.activator.control import KEY, OTHER, STRANGER, VERSION, key_row, replica_row, version_row
from tests.activator.queue.test_circuit_breakers import failure
from tests.activator.replica import FakeReplica, hello, silent
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world

CAP = CapOutput(tokens=16)
SMALL = Fallback(model="small")
NEVER = {"x-kelvin-degrade": "never"}
DEGRADED = "x-kelvin-degraded"


def row(model: str, *steps: DegradationStep, grantees: tuple[str, ...] = ()) -> ModelRow:
    """Return the row of a model of the default tenant with these degradation steps."""
    aliases = {"prod": VERSION} | ({"next": OTHER} if model == "m" else {})
    return ModelRow(tenant="default", model=model, aliases=aliases, created_at_s=7, ladder=steps, grantees=grantees)


async def small(here: ActivatorWorld, *steps: DegradationStep, name: str = "small") -> FakeReplica:
    """Publish another model, with one replica."""
    replica = await here.replica(name, model=name, waits_until_read=False)
    here.control.publish(
        models=(row(name, *steps),),
        versions=(version_row("default", name, VERSION),),
    )
    return replica


async def set_degradation(here: ActivatorWorld, *steps: DegradationStep, grantees: tuple[str, ...] = ()) -> None:
    """Set the degradation steps of model `m`."""
    await here.publish(models=(row("m", *steps, grantees=grantees),))


@asynccontextmanager
async def full(tmp_path: Path) -> AsyncIterator[tuple[ActivatorWorld, asyncio.Task[ReceivedResponse]]]:
    """Start an activator where one request waits for `m`, which has no replica. The queue has no room for another."""
    async with world(tmp_path, queue_requests=1) as here:
        waiting = asyncio.create_task(here.post())
        await here.wait_for_queued(1)
        try:
            yield here, waiting
        finally:
            waiting.cancel()
            await asyncio.wait((waiting,))


@pytest.mark.parametrize("stream", [False, True])
async def test_another_model_answers_instead_of_a_refusal(tmp_path: Path, stream: bool) -> None:
    """The response names the step. The usage record charges the fallback model and names the requested one. The body is
    forwarded unchanged.
    """

    async with full(tmp_path) as (here, _):
        body = CHAT | {"stream": stream}
        assert (await here.post(body=body)).status == 503, "without a degradation step"
        replica = await small(here)
        await set_degradation(here, SMALL)
        got = await here.post(body=body)
        assert (got.status, got.headers[DEGRADED]) == (200, "fallback=small")
        assert replica.calls[0].wanted == body
        assert replica.calls[0].headers["x-kelvin-gave-up"] == "fallback-of=m", (
            "for the record that the replica may write"
        )
        found = {each.request_id: each for each in await here.control.wait_for_records(2)}
        record = found[got.headers["x-request-id"]]
        assert (record.model, record.runtime_id, record.outcome) == ("small", "small", "ok")
        assert (record.degraded, record.completion_tokens) == ("fallback-of=m", 2)
        assert await here.metric_value("kelvin_degraded_total", step="fallback", tenant="default", model="m") == 1


async def test_caller_can_forbid_degradation(tmp_path: Path) -> None:
    """`x-kelvin-degrade: never` is the only valid value. The steps hold for the default alias only."""

    async with full(tmp_path) as (here, _):
        replica = await small(here)
        await set_degradation(here, SMALL)
        got = await here.post(**NEVER)
        assert (got.status, got.code) == (503, "overloaded")
        assert DEGRADED not in got.headers
        bad = await here.post(**{"x-kelvin-degrade": "maybe"})
        assert (bad.status, bad.code) == (400, "invalid_request")
        assert b"must be never" in bad.body
        named = await here.post(body=CHAT | {"model": f"m@{VERSION[:12]}"})
        assert (named.status, named.code) == (503, "overloaded")
        assert not replica.calls
        assert (await here.post()).status == 200


async def test_a_capped_answer_fits_into_a_queue_full_of_tokens(tmp_path: Path) -> None:
    """The replica is told the cap. A request that finds a free slot is not degraded."""

    async with world(tmp_path, queue_tokens=100) as here:
        replica = await here.replica("a", silent, max_streams=1)
        await set_degradation(here, CAP)
        holder = asyncio.create_task(here.post())
        await replica.until(lambda r: r.running == 1)
        refused = await here.post(**NEVER)
        assert (refused.status, refused.code) == (503, "overloaded")
        waiting = asyncio.create_task(here.post())
        await here.wait_for_queued(1)
        replica.script = hello
        holder.cancel()
        got = await waiting
        assert (got.status, got.headers[DEGRADED]) == (200, "cap-output=16")
        assert replica.calls[1].headers["x-kelvin-cap-tokens"] == "16"
        free = await here.post()
        assert DEGRADED not in free.headers
        assert not {"x-kelvin-cap-tokens", "x-kelvin-gave-up"} & set(replica.calls[2].headers)
        records = {each.request_id: each for each in await here.control.wait_for_records(4)}
        record = records[got.headers["x-request-id"]]
        assert (record.model, record.degraded) == ("m", "cap-output=16")
        assert records[free.headers["x-request-id"]].degraded is msgspec.UNSET


async def test_cold_model_falls_back_while_it_starts(tmp_path: Path) -> None:
    """The expected 9 s exceed the step's 5 s. The model starts all the same. A step of 10 s does not apply."""

    async with world(tmp_path) as here:
        await small(here)
        start = StartRow(tenant="default", model="m", version=VERSION, start_ms=9000)
        here.control.publish(starts=(start,))
        await set_degradation(here, Fallback(model="small", wait_s=5))
        got = await here.post()
        assert (got.status, got.headers[DEGRADED]) == (200, "fallback=small")
        async with asyncio.timeout(30):
            # A stat without the request could be one from before it arrived.
            while not [each for each in here.control.stats if each.model == "m" and each.requests == 1]:
                await here.control.wait_for_stat(count=len(here.control.stats) + 1)
        await set_degradation(here, Fallback(model="small", wait_s=10))
        waiting = asyncio.create_task(here.post())
        await here.wait_for_queued(1)
        await here.replica("a")
        assert DEGRADED not in (await waiting).headers


async def test_long_queue_triggers_a_degradation_step(tmp_path: Path) -> None:
    """Once the throughput is known, any wait exceeds the step's microsecond. Without a queue no step applies."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", max_streams=1)
        await small(here)
        await set_degradation(here, Fallback(model="small", wait_s=1e-6))
        for _ in range(8):
            assert DEGRADED not in (await here.post()).headers
        replica.script = silent
        holder = asyncio.create_task(here.post())
        await replica.until(lambda r: r.running == 1)
        waiting = asyncio.create_task(here.post())
        await here.wait_for_queued(1)
        assert (await here.post()).headers[DEGRADED] == "fallback=small"
        replica.script = hello
        holder.cancel()
        assert DEGRADED not in (await waiting).headers


async def test_guest_falls_back_only_to_callable_models(tmp_path: Path) -> None:
    """Without a grant of the fallback model the caller gets the refusal. With a grant it is charged for that model."""

    async with full(tmp_path) as (here, _):
        replica = await small(here)
        await set_degradation(here, SMALL, grantees=("stranger",))
        body = CHAT | {"model": "default/m"}
        got = await here.post(body=body, key=STRANGER)
        assert (got.status, got.code) == (503, "overloaded")
        assert not replica.calls
        await here.publish(models=(row("small", grantees=("stranger",)),))
        narrow = key_row("k9", NARROW, "stranger", Scope.INFER)
        await here.publish(keys=(msgspec.structs.replace(narrow, models=("default/m",)),))
        assert (await here.post(body=body, key=NARROW)).code == "overloaded", "the key may not call the fallback"
        got = await here.post(body=body, key=STRANGER)
        assert (got.status, got.headers[DEGRADED]) == (200, "fallback=default/small")
        assert replica.calls[0].headers["x-kelvin-guest"] == "stranger"
        records = {each.request_id: each for each in await here.control.wait_for_records(3)}
        record = records[got.headers["x-request-id"]]
        assert (record.tenant, record.model, record.degraded) == (
            "stranger",
            "default/small",
            "fallback-of=default/m",
        )


async def test_useless_degradation_step_is_skipped(tmp_path: Path) -> None:
    """The fallback is full too, and its own steps are not applied. The refusal and record name the first model."""

    async with full(tmp_path) as (here, _):
        third = await small(here, name="third")
        other = await small(here, Fallback(model="third"))
        other.script = silent
        here.control.publish(replica_row("small", 1, model="small"))
        await set_degradation(here, SMALL)
        holding = asyncio.create_task(here.post(body=CHAT | {"model": "small"}))
        await other.until(lambda r: r.running == 1)
        waiting = asyncio.create_task(here.post(body=CHAT | {"model": "small"}, **NEVER))
        await here.wait_for_queued(2)
        got = await here.post()
        assert (got.status, got.code) == (503, "overloaded")
        (record,) = await here.control.wait_for_records(1)
        assert (record.model, record.degraded) == ("m", msgspec.UNSET)
        assert not third.calls
        await set_degradation(here, SMALL, Fallback(model="third"))
        assert (await here.post()).headers[DEGRADED] == "fallback=third"
        for each in (holding, waiting):
            each.cancel()
        await asyncio.wait((holding, waiting))


async def test_failed_start_falls_back(tmp_path: Path) -> None:
    """A request that waited, and one that finds the circuit breaker open, get the fallback. A stream whose head was
    sent can't name the step, so it gets the failure.
    """

    async with world(tmp_path) as here:
        replica = await small(here)
        await set_degradation(here, SMALL)
        waiting = asyncio.create_task(here.post())
        url, key = here.url + "/v1/chat/completions", {"authorization": f"Bearer {KEY}"}
        async with here.client.post(url, json=CHAT | {"stream": True}, headers=key) as stream:
            await here.wait_for_queued(2)
            here.control.publish(failures=(failure("chunk_corrupt"),))
            assert (await waiting).headers[DEGRADED] == "fallback=small"
            assert b"chunk_corrupt" in await stream.read()
        assert len(replica.calls) == 1
        # On a slow machine the model may be tried again by then. Each failure opens the breaker for longer.
        async with asyncio.timeout(60):
            while (got := await here.post(x_kelvin_deadline_ms="500")).status != 200:
                assert got.code == "deadline_exceeded"
                await here.publish(failures=(failure("chunk_corrupt"),))
        assert got.headers[DEGRADED] == "fallback=small"


@pytest.mark.parametrize(("tokens", "want"), [(1024, 200), (1025, 503)])
async def test_fallback_respects_the_fallback_models_limits(tmp_path: Path, tokens: int, want: int) -> None:
    """A request above the fallback model's limit is not sent to it."""

    async with full(tmp_path) as (here, _):
        replica = await small(here)
        await set_degradation(here, SMALL)
        assert (await here.post(body=CHAT | {"max_tokens": tokens})).status == want
        assert len(replica.calls) == (want == 200)
