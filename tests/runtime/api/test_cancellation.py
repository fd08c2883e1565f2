"""Clients that leave at any moment leave nothing behind: no KV block, stream, task, descriptor or record."""

import asyncio
import os
import random
from pathlib import Path

import aiohttp
import pytest

from kelvin.contracts.serving.stream_frames import FrameDecoder, FrameKind
from tests.runtime.fakes import ReplicaServer, frames_until, script_of, serve_replica
from tests.runtime.scripted_engine import ScriptedEngine

TEXT = "one two three four five six seven " * 4
REQUESTS = 120
WAYS = ("read", "close", "delete", "deadline", "cut body", "close early", "stop string")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def _one(each: ReplicaServer, number: int, chance: random.Random) -> str:
    """Send one request that ends in a random one of WAYS. Return the way."""
    way = chance.choice(WAYS)
    request_id = f"r{number}"
    body: dict[str, object] = {"prompt": "Once", "stream": chance.random() < 0.7, "max_tokens": 100}
    if number % 3 == 0:
        body["user"] = "u" * 5000  # so long that it would be encoded in the thread, if it were a prompt
    headers: dict[str, str] = {"request_id": request_id}
    if way == "deadline":
        headers["deadline_ms"] = str(chance.randrange(40))
    if way == "stop string":
        body["stop"] = "four"
    if way == "cut body":
        await _cut_body(each, request_id)
        return way
    if way == "close early":
        request = asyncio.create_task(each.frames(body=body, **headers))
        await asyncio.sleep(chance.random() * 0.02)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        return way
    async with each.open(body=body, **headers) as answer:
        decoder = FrameDecoder()
        kinds: list[FrameKind] = []
        reads = chance.randrange(6)
        while chunk := await answer.content.readany():
            kinds += [frame.kind for frame in decoder.feed(chunk)] if answer.status == 200 else []
            reads -= 1
            if way == "close" and reads <= 0:
                answer.close()
                return way
            if way == "delete" and reads <= 0:
                async with each.session.delete(f"http://rt/v1/requests/{request_id}") as deleted:
                    assert deleted.status == 204
        if answer.status == 200:
            assert decoder.is_clean
            assert kinds[-1] in (FrameKind.END, FrameKind.FAILED)
            assert not {FrameKind.END, FrameKind.FAILED} & set(kinds[:-1])
        else:
            assert answer.status in (503, 504, 499)
    await each.send_receipt(request_id, 0, recorded=True)
    return way


async def _cut_body(each: ReplicaServer, request_id: str) -> None:
    """Send a part of a request's body, then close the connection."""
    reader, writer = await asyncio.open_unix_connection(each.directory.address("rt-x.sock"))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: rt\r\nx-kelvin-request-id: {request_id}\r\ncontent-length: 100\r\n\r\n"
    )
    writer.write(head.encode() + b'{"prompt": "On')
    await writer.drain()
    await asyncio.sleep(0)
    writer.close()
    await writer.wait_closed()
    assert reader is not None


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_cancelled_requests_leave_no_state(tmp_path: Path, seed: int) -> None:
    """After 120 concurrent requests in all ways of ending, everything is as before."""
    chance = random.Random(seed)

    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), step_s=0.001), grace_s=0.01) as each:
        await each.frames(body={"max_tokens": 1})  # initialise everything lazy
        await each.wait_until_idle()
        await _reconnect(each)
        files, tasks = _open_files(), len(asyncio.all_tasks())
        many = asyncio.Semaphore(24)

        async def bounded(number: int) -> str:
            async with many:
                return await _one(each, number, chance)

        ways = await asyncio.gather(*(bounded(number) for number in range(REQUESTS)))
        assert set(ways) == set(WAYS)
        await each.wait_until_idle()
        await each.orphans.flush()
        await _reconnect(each)
        await each.until("connections and watchers are gone", lambda: _open_files() <= files)
        await each.until("tasks are gone", lambda: len(asyncio.all_tasks()) <= tasks)
        ids = [record.request_id for record in each.records.records]
        assert len(ids) == len(set(ids)), "one record for one orphan"
        lost = {f"r{number}" for number, way in enumerate(ways) if way in ("close", "close early")}
        assert set(ids) <= lost, "only a lost connection makes an orphan"
        assert each.engine.running == 0


async def _reconnect(each: ReplicaServer) -> None:
    """Close kept-alive connections, which are no leak."""
    await each.session.close()
    connector = aiohttp.UnixConnector(path=each.directory.address("rt-x.sock"), limit=0)
    each.session = aiohttp.ClientSession(connector=connector)
    await asyncio.sleep(0.05)  # time for the server to notice


async def test_leak_check_finds_a_planted_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if a disconnect does not cancel, the engine still runs after the response."""
    monkeypatch.setattr("runtime.drivers.event_stream.EventStream.stop", lambda self: None)

    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True, "max_tokens": 100}) as answer:
            each.engine.allow(3)
            await answer.content.readany()
            answer.close()
        await each.until("no exchange", lambda: each.api.served_requests == 0)
        assert each.engine.running == 1
        assert each.engine.cancelled == []


async def test_a_disconnect_cancels_before_the_next_step(tmp_path: Path) -> None:
    """A request is cancelled while a step runs, and gets no further step."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True, "max_tokens": 100}) as answer:
            each.engine.allow(1)
            await answer.content.readany()
            answer.close()
        await each.until("no exchange", lambda: each.api.served_requests == 0)
        each.engine.allow(1)  # the step that was running
        await each.until("it was cancelled", lambda: len(each.engine.cancelled) == 1)
        assert len(each.engine.admitted) == 1
        await each.wait_until_idle()


@pytest.mark.parametrize("is_over", [pytest.param(False, id="running"), pytest.param(True, id="all of it sent")])
@pytest.mark.parametrize("elsewhere", [True, False])
async def test_request_answered_elsewhere_is_recorded_as_cancelled(
    tmp_path: Path, elsewhere: bool, is_over: bool
) -> None:
    """A request answered by another replica is recorded as cancelled, with its cost and without tokens.
    Control: after a plain DELETE the activator owes the record."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True), grace_s=60.0) as each:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            each.engine.allow()
            await frames_until(answer, FrameDecoder(), 1)
            if is_over:
                each.engine.run_freely()
                await answer.read()
            headers = {"x-kelvin-elsewhere": "1"} if elsewhere else {}
            async with each.session.delete("http://rt/v1/requests/r1", headers=headers) as deleted:
                assert deleted.status == 204
        await each.wait_until_idle()
        assert each.meter.meter.requests == 1
        assert len(each.orphans) == (not elsewhere)
        if elsewhere:
            await each.until("a record", lambda: len(each.records.records) == 1)
            (record,) = each.records.records
            assert (record.request_id, record.outcome, record.completion_tokens) == ("r1", "cancelled", 0)
            assert record.prompt_tokens > 0


@pytest.mark.parametrize("seen", [pytest.param(3, id="after its head"), pytest.param(0, id="before its head")])
async def test_cancelled_answer_is_charged_until_it_stopped(tmp_path: Path, seen: int) -> None:
    """The last frame of a deleted answer counts the step that ran during the DELETE. The activator bills by it.
    If no frame was sent before, it is the whole answer."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        opening = asyncio.create_task(_opened(each))
        each.engine.allow(3)
        await each.until("three tokens", lambda: each.engine.generated == 3)
        decoder, frames = FrameDecoder(), []
        if seen:
            frames += await frames_until(await opening, decoder, seen)
        await _delete(each)
        answer = await opening
        assert answer.status == 200
        frames += decoder.feed(await answer.read())
        assert len(frames) == (2 if seen else 1)
        assert frames[-1].kind is FrameKind.FAILED
        assert (frames[-1].counts.prompt_tokens > 0, frames[-1].counts.completion_tokens) == (True, 4)
        assert each.meter.meter.requests == 1
        await each.send_receipt("r1", 0, recorded=True)
        await each.wait_until_idle()


async def test_answer_that_a_drain_cuts_off_costs_what_was_computed(tmp_path: Path) -> None:
    """When a drain cuts off an answer, its last frame counts the step that runs meanwhile."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        opening = asyncio.create_task(_opened(each))
        each.engine.allow(3)
        answer, decoder = await opening, FrameDecoder()
        await frames_until(answer, decoder, 3)
        each.replica.drain()
        each.replica.abort_in_flight()
        each.engine.allow(1)
        (last,) = decoder.feed(await answer.read())
        assert (last.kind, last.counts.completion_tokens) == (FrameKind.FAILED, 4)
        await each.send_receipt("r1", 0, recorded=True)
        await each.wait_until_idle()


async def _opened(each: ReplicaServer) -> aiohttp.ClientResponse:
    answer: aiohttp.ClientResponse = await each.open(body={"max_tokens": 100, "stream": False})
    return answer


async def _delete(each: ReplicaServer) -> None:
    """Delete the request during a step, which then ends."""
    async with each.session.delete("http://rt/v1/requests/r1") as deleted:
        assert deleted.status == 204
    each.engine.allow(1)
