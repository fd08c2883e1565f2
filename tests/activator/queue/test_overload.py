"""Overload over HTTP: bounded queues and bodies, deadlines, slow readers, drains, and an absent control plane."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.activator.control import KEY, STRANGER
from tests.activator.replica import DONE, ReceivedRequest, chunk, halves, hello, silent
from tests.activator.world import CHAT, STREAM, ActivatorWorld, ReceivedResponse, http, world


async def test_total_body_bytes_are_bounded(tmp_path: Path) -> None:
    """A body that would not fit beside the others is refused before it is read. Alone it fits."""

    async with world(tmp_path, body_bytes_in_all=60_000) as here:
        replica = await here.replica("a", silent)
        large = json.dumps(CHAT | {"pad": "x" * 40_000}).encode()
        first = asyncio.create_task(here.post(body=large))
        await replica.until(lambda r: len(r.calls) == 1)
        got = await here.post(body=large)
        assert (got.status, got.code) == (503, "overloaded")
        first.cancel()
        await replica.until(lambda r: len(r.deleted) == 1)
        await here.control.wait_for_records(1)
        replica.script = hello
        assert (await here.post(body=large)).status == 200


async def _unmeasured(here: ActivatorWorld, goes_on: asyncio.Event | None = None) -> ReceivedResponse:
    """Send a request of unknown length. Its body continues once `goes_on` is set."""

    async def parts() -> AsyncIterator[bytes]:
        payload = json.dumps(CHAT).encode()
        yield payload[:10]
        if goes_on is not None:
            await goes_on.wait()
        yield payload[10:]

    headers = {"authorization": f"Bearer {KEY}"}
    async with here.client.post(here.url + "/v1/chat/completions", data=parts(), headers=headers) as answer:
        return ReceivedResponse(answer.status, dict(answer.headers), await answer.read())


async def test_a_body_keeps_no_more_room_than_it_needs(tmp_path: Path) -> None:
    """A body of unknown length reserves the maximum until it is received, then only its size. Two that are still being
    received don't both fit.
    """

    async with world(tmp_path, body_bytes=65_536, body_bytes_in_all=100_000) as here:
        replica = await here.replica("a", silent)
        first = asyncio.create_task(_unmeasured(here))
        await replica.until(lambda r: len(r.calls) == 1)
        replica.script = hello
        assert (await _unmeasured(here)).status == 200
        goes_on = asyncio.Event()
        late = asyncio.create_task(_unmeasured(here, goes_on))
        async with asyncio.timeout(30):
            while (got := await _unmeasured(here)).status == 200:
                await asyncio.sleep(0.005)
        assert (got.status, got.code) == (503, "overloaded")
        goes_on.set()
        assert (await late).status == 200
        first.cancel()
        await replica.until(lambda r: len(r.deleted) == 1)


async def test_slow_bodies_of_one_tenant_leave_room_to_others(tmp_path: Path) -> None:
    """Bodies of unknown length reserve the maximum. One tenant's bodies reserve at most half of the total."""

    async with world(tmp_path, body_bytes=10_000, body_bytes_in_all=80_000) as here:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        writers = []
        for _ in range(12):
            _, writer = await here.raw(f"{head}Transfer-Encoding: chunked\r\n\r\n1\r\n".encode())
            writers.append(writer)
        async with asyncio.timeout(30):
            while (got := await here.post(body=CHAT | {"model": "none"})).status == 404:
                await asyncio.sleep(0.005)
        assert (got.status, got.code) == (503, "overloaded")
        assert b"your tenant" in got.body
        assert (await here.post(body=CHAT | {"model": "none"}, key=STRANGER)).status == 404
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(
    "request_line",
    [
        pytest.param("POST /v1/chat/completions", id="completion"),
        pytest.param("GET /v1/models", id="list of models"),
        pytest.param("GET /v2", id="server metadata"),
        pytest.param("DELETE /v1/requests/x", id="cancellation"),
    ],
)
async def test_slow_bodies_leave_places_to_other_tenants(tmp_path: Path, request_line: str) -> None:
    """Requests with slow bodies use at most half of all places, however small they are. A complete body needs none."""

    async with world(tmp_path, requests=16) as here:
        slow = f"{request_line} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer "
        writers, answers = [], []
        for _ in range(12):
            reader, writer = await here.raw(f"{slow}{KEY}\r\n\r\n".encode())
            writers.append(writer)
            answers.append(asyncio.create_task(reader.readuntil(b"unread request bodies of your tenant")))
        refused: set[asyncio.Task[bytes]] = set()
        async with asyncio.timeout(30):
            while len(refused) < 4:
                refused |= (await asyncio.wait(set(answers) - refused, return_when=asyncio.FIRST_COMPLETED))[0]
        assert all(each.result().startswith(b"HTTP/1.1 503 ") for each in refused)
        assert (await here.post(body=CHAT | {"model": "none"})).status == 404
        reader, writer = await here.raw(f"{slow}{STRANGER}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert sum(each.done() for each in answers) == 4
        for each in (*writers, writer):
            each.close()
        await asyncio.gather(*answers, return_exceptions=True)


async def test_tenant_limits_override_the_installations(tmp_path: Path) -> None:
    """The feed's limits on concurrent requests and body bytes give 429 and 413 for that tenant, nothing for another.
    New limits apply at once.
    """

    async with world(tmp_path) as here:
        replica = await here.replica("a", silent)
        await here.limit(requests=1, body_bytes=2048)
        large = json.dumps(CHAT | {"pad": "x" * 4000}).encode()
        got = await here.post(body=large)
        assert (got.status, got.code) == (413, "request_too_large")
        first = asyncio.create_task(here.post())
        await replica.until(lambda r: len(r.calls) == 1)
        got = await here.post()
        assert (got.status, got.code, got.headers["retry-after"]) == (429, "tenant_busy", "1")
        assert b"1 requests under way" in got.body
        theirs = await here.post(body=CHAT | {"model": "nothing"}, key=STRANGER)
        assert theirs.status == 404
        await here.limit()
        replica.script = hello
        assert (await here.post(body=large)).status == 200
        first.cancel()
        await replica.until(lambda r: len(r.deleted) == 1)


async def test_a_deadline_that_passes_in_the_queue_is_504(tmp_path: Path) -> None:
    """The client's own deadline passes before any response byte, so the status is 504."""

    async with world(tmp_path) as here:
        got = await here.post(x_kelvin_deadline_ms="200")
        assert (got.status, got.code) == (504, "deadline_exceeded")
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.status) == ("deadline_exceeded", 504)


async def test_the_queues_own_limit_of_time_is_504(tmp_path: Path) -> None:
    """Without a client deadline KELVIN_QUEUE_S applies."""

    async with world(tmp_path, queue_s=0.2) as here:
        assert (await here.post()).status == 504


async def test_a_deadline_in_the_answer_cancels_upstream(tmp_path: Path) -> None:
    """The runtime is slow. The deadline cancels the request there too."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", silent)
        got = await here.post(x_kelvin_deadline_ms="300")
        assert got.status == 504
        await replica.until(lambda r: len(r.deleted) == 1)
        assert int(replica.calls[0].headers["x-kelvin-deadline-ms"]) <= 300


async def test_warm_models_serve_while_the_control_plane_is_away(tmp_path: Path) -> None:
    """The last routing table stays valid. Records wait in the spool, and each is shipped once afterwards."""

    async with world(tmp_path) as here:
        await here.replica("a")
        await here.control.stop()
        for _ in range(5):
            assert (await here.post()).status == 200
        assert here.control.records == []
        await here.control.start(here.data / "run")
        records = await here.control.wait_for_records(5)
        assert sorted(record.sequence for record in records) == [1, 2, 3, 4, 5]
        await here.settled()
        assert (await here.post()).status == 200


async def test_records_outlive_a_killed_activator(tmp_path: Path) -> None:
    """SIGKILL right after the answer: the record is on disk, and the next activator ships it."""

    async with world(tmp_path) as here:
        await here.replica("a")
        here.control.refuse_usage = True
        got = await here.post()
        here.process.kill()
        await here.process.wait()
        assert here.control.records == []
        request_id = got.headers["x-request-id"]
        found = [path for path in (here.data / "spool").rglob("*") if path.is_file()]
        assert any(request_id.encode() in path.read_bytes() for path in found)
        here.control.refuse_usage = False
        await here.restart()
        (record,) = await here.control.wait_for_records(1)
        assert (record.request_id, record.outcome) == (request_id, "ok")


@pytest.mark.parametrize(
    "reads", [pytest.param(False, id="a slow reader"), pytest.param(True, id="control: a fast reader")]
)
async def test_a_slow_reader_stops_its_producer(tmp_path: Path, reads: bool) -> None:
    """A client that reads nothing pauses the runtime. The activator buffers no more than its limits."""
    written = 0
    event = chunk("x" * 4000)
    total = 8000  # 32 MB

    async def flood(call: ReceivedRequest) -> None:
        nonlocal written
        for number in range(total):
            await call.data(event, number + 1)
            written = number + 1
        await call.data(DONE, total)
        await call.end(total)

    async with world(tmp_path, stall_s=2) as here:
        await here.replica("a", flood)
        process = psutil.Process(here.process.pid)
        before = process.memory_info().rss
        reader, writer = await here.raw()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(http(json.dumps(STREAM).encode()))
        await writer.drain()
        if reads:
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            while await reader.read(1 << 20):
                if written == total:
                    break
        (record,) = await here.control.wait_for_records(1)
        grown = process.memory_info().rss - before
        assert grown < 16 << 20, grown
        if reads:
            assert (record.outcome, record.completion_tokens) == ("ok", total)
        else:
            assert record.outcome == "cancelled"
            assert record.completion_tokens <= written < total / 2, written
        writer.transport.abort()


async def _until_refused(here: ActivatorWorld) -> None:
    while True:
        try:
            _, other = await here.raw()
        except OSError:
            return
        other.transport.abort()


async def test_a_drain_finishes_what_runs_and_exits_0(tmp_path: Path) -> None:
    """After SIGTERM no new connections are accepted, the running stream ends normally, and its record is shipped."""
    held = halves()

    async with world(tmp_path) as here:
        await here.replica("a", held)
        reader, writer = await here.raw(http(json.dumps(STREAM).encode()))
        await reader.readuntil(b"data: ")
        ending = asyncio.create_task(here.terminate())
        async with asyncio.timeout(30):
            await _until_refused(here)
        held.release()
        rest = await reader.read()
        assert b"data: [DONE]" in rest
        assert await ending == 0
        assert [record.outcome for record in here.control.records] == ["ok"]
        writer.close()


async def test_a_drain_whose_time_is_over_tells_its_streams(tmp_path: Path) -> None:
    """A stream that still runs gets a terminal event, is cancelled at its replica and recorded. The exit is 0."""

    async with world(tmp_path, activator_drain_s=1) as here:
        replica = await here.replica("a", silent)
        request_task = asyncio.create_task(here.post(body=STREAM))
        await replica.until(lambda r: len(r.calls) == 1)
        assert await here.terminate() == 0
        got = await request_task
        assert b"unavailable" in got.body
        assert replica.deleted == [replica.calls[0].request_id]
        assert [record.outcome for record in here.control.records] == ["unavailable"]
