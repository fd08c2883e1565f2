"""Requests with an `Idempotency-Key`, over TLS: one run, the same bytes for every repeat, one charge."""

import asyncio
import json
from pathlib import Path

import pytest

from kelvin.contracts.traffic_errors import Overloaded
from tests.activator.answers.idempotent_calls import ASK, KEYED, same, sent
from tests.activator.control import KEY
from tests.activator.replica import DONE, ReceivedRequest, chunk, halves, hello, refuses, unfiltered
from tests.activator.world import CHAT, STREAM, world


@pytest.mark.parametrize("body", [pytest.param(CHAT, id="whole"), pytest.param(STREAM, id="streamed")])
async def test_a_repeat_gets_the_same_bytes_and_no_charge(tmp_path: Path, body: dict[str, object]) -> None:
    """A repeat gets the same status, headers and body, and names the first request. The replica runs once. A request
    without a key or with another key runs again.
    """

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        first = await here.post(body=body, **ASK)
        again = await here.post(body=body, **ASK)
        assert first.status == 200
        assert same(first, again)
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["x-kelvin-repeat-of"] == first.headers["x-request-id"]
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        assert len(replica.calls) == 1
        records = await here.control.wait_for_records(2)
        assert sent(records) == [("ok", 200, 2, True), ("replayed", 200, 0, False)]
        assert records[1].runtime_id is None
        assert replica.calls[0].headers["x-kelvin-once"] == records[0].once
        await here.post(body=body)
        await here.post(body=body, **{"idempotency-key": "order-8"})
        assert len(replica.calls) == 3
        assert await here.metric_value("kelvin_repeats_total", answer="replayed") == 1
        assert await here.metric_value("kelvin_kept_answers") == 2


async def test_failed_response_is_not_replayed(tmp_path: Path) -> None:
    """A failure of the replica or before it is not stored. Its record has no charge id, so it costs nothing."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", refuses(Overloaded("the queue", 1, 1.0)))
        failed = await here.post(**ASK)
        assert failed.status == 503
        replica.script = hello
        assert (await here.post(body=CHAT | {"model": "m@none"}, **ASK)).status == 404
        served = await here.post(**ASK)
        assert (served.status, "x-kelvin-repeat-of" in served.headers) == (200, False)
        assert [bool(each.once) for each in await here.control.wait_for_records(3)] == [False, False, True]


async def test_answer_that_passed_unfiltered_is_not_kept_for_its_key(tmp_path: Path) -> None:
    """A repeat runs again, filtered this time, and both runs have one charge id."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", unfiltered)
        assert (await here.post(**ASK)).status == 200
        replica.script = hello
        again = await here.post(**ASK)
        assert (again.status, "x-kelvin-repeat-of" in again.headers) == (200, False)
        third = await here.post(**ASK)
        assert third.headers["x-kelvin-repeat-of"] == again.headers["x-request-id"]
        assert len(replica.calls) == 2
        records = await here.control.wait_for_records(3)
        assert records[0].once == records[1].once
        assert [record.outcome for record in records] == ["ok", "ok", "replayed"]


async def test_a_key_belongs_to_one_request(tmp_path: Path) -> None:
    """The same key with another body, path or model is 422, during the run and after it. The first request goes on."""

    async with world(tmp_path) as here:
        held = halves()
        replica = await here.replica("a", held)
        running = asyncio.create_task(here.post(**ASK))
        await replica.until(lambda r: len(r.calls) == 1)
        others = [
            ("/v1/chat/completions", CHAT | {"seed": 1}),
            ("/v1/chat/completions", CHAT | {"model": "m@next"}),
            ("/v1/completions", CHAT | {"prompt": "x"}),
        ]
        for round in range(2):
            for path, body in others:
                refused = await here.post(path, body, **ASK)
                assert (refused.status, refused.code) == (422, "idempotency_key_reused"), (round, path)
            held.release()
            first = await running
        assert same(first, await here.post(**ASK))
        assert len(replica.calls) == 1


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        pytest.param([b""], b"1 to 255 visible", id="empty"),
        pytest.param([b"a" * 256], b"1 to 255 visible", id="too long"),
        pytest.param([b"two words"], b"1 to 255 visible", id="a space"),
        pytest.param(["Schlüssel".encode()], b"1 to 255 visible", id="beyond ASCII"),
        pytest.param([b"one", b"two"], b"exactly one", id="two of them"),
    ],
)
async def test_malformed_idempotency_key_is_refused(tmp_path: Path, lines: list[bytes], rule: bytes) -> None:
    """400 names the rule but not the value. No replica is called."""

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        reader, writer = await here.raw()
        extra = b"".join(b"Idempotency-Key: " + line + b"\r\n" for line in lines)
        body = json.dumps(CHAT).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n".encode() + extra + b"\r\n" + body)
        got = await reader.readuntil(b"}}")
        writer.close()
        assert got.startswith(b"HTTP/1.1 400 ")
        assert rule in got
        assert b"idempotency-key" in got
        assert replica.calls == []


async def test_openai_client_sends_idempotency_keys(tmp_path: Path) -> None:
    """The client's `Idempotency-Key` header makes a repeat return the first answer."""
    openai = pytest.importorskip("openai")

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        import httpx

        async with openai.AsyncOpenAI(
            api_key=KEY, base_url=f"{here.url}/v1", http_client=httpx.AsyncClient(verify=here.tls)
        ) as client:
            ids = [
                (
                    await client.chat.completions.create(
                        model="m",
                        messages=[{"role": "user", "content": "hi"}],
                        extra_headers={"Idempotency-Key": "k"},
                    )
                ).id
                for _ in range(2)
            ]
        assert len(set(ids)) == 1
        assert len(replica.calls) == 1


async def test_slow_readers_of_a_kept_answer_hold_a_part_of_the_room(tmp_path: Path) -> None:
    """Each reader holds the whole answer. A tenant over its part of KELVIN_ONCE_BYTES gets 503."""

    async def large(call: ReceivedRequest) -> None:
        for tokens in range(1, 41):
            await call.data(chunk("x" * 95_000), tokens)
        await call.data(DONE, 40)
        await call.end(40)

    async with world(tmp_path, once_bytes=6 << 20) as here:
        await here.replica("a", large)
        first = await here.post(body=STREAM, **ASK)
        _, writer = await here.raw()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(KEYED)
        await here.wait_for_metric("kelvin_repeats_total", 1, answer="replayed")
        refused = await here.post(body=STREAM, **ASK)
        assert refused.status == 503
        assert refused.code == Overloaded.code
        writer.transport.abort()
        await here.wait_for_metric("kelvin_requests_inside", 0)
        assert same(await here.post(body=STREAM, **ASK), first)
