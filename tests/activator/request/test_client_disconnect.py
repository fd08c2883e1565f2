"""Client disconnects at every stage: the work behind the request ends, its slot is free, its record is written."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from kelvin.contracts.serving.stream_frames import FrameKind
from tests.activator.control import OTHER
from tests.activator.replica import Held, ReceivedRequest, endless, hello, silent
from tests.activator.world import CHAT, ActivatorWorld, http, world
from tests.eventually import eventually

STREAM = json.dumps(CHAT | {"stream": True}).encode()


async def _leave_once(here: ActivatorWorld, body: bytes, until: "asyncio.Future[None] | None" = None) -> None:
    reader, writer = await here.raw(http(body))
    await writer.drain()
    if until is not None:
        await until
    else:
        await reader.readuntil(b"data: ")
    writer.transport.abort()


async def test_leaving_mid_stream_cancels_upstream_and_frees_the_slot(tmp_path: Path) -> None:
    """The runtime gets DELETE while its connection still stands. The one slot serves the next request at once."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", endless, max_streams=1)
        await _leave_once(here, STREAM)
        await replica.until(lambda r: r.deleted == [r.calls[0].request_id])
        assert replica.deleted_before_close == replica.deleted
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.status) == ("cancelled", 499)
        assert record.completion_tokens >= 1
        await replica.until(lambda r: r.recorded == r.deleted)
        replica.script = hello
        assert (await here.post()).status == 200


async def test_leaving_before_the_first_token_cancels_upstream(tmp_path: Path) -> None:
    """The runtime has not sent anything yet. It is told all the same."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", silent, max_streams=1)
        started = asyncio.ensure_future(replica.until(lambda r: len(r.calls) == 1))
        await _leave_once(here, STREAM, started)
        await replica.until(lambda r: len(r.deleted) == 1)
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.completion_tokens, record.runtime_id) == ("cancelled", 0, "a")
        replica.script = hello
        assert (await here.post()).status == 200


async def test_leaving_a_whole_answer_cancels_upstream(tmp_path: Path) -> None:
    """A disconnect is noticed during an answer that does not stream."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", silent, max_streams=1)
        started = asyncio.ensure_future(replica.until(lambda r: len(r.calls) == 1))
        await _leave_once(here, json.dumps(CHAT).encode(), started)
        await replica.until(lambda r: len(r.deleted) == 1)
        (record,) = await here.control.wait_for_records(1)
        assert record.outcome == "cancelled"


@pytest.mark.parametrize("beats", [pytest.param(8, id="after its head"), pytest.param(0, id="before its head")])
@pytest.mark.parametrize("way", ["leaves", "deadline", "drain"])
async def test_cut_whole_answer_is_charged_for_what_was_computed(tmp_path: Path, way: str, beats: int) -> None:
    """A disconnect or a deadline charges the prompt and the tokens computed when the cut took effect. The end of a
    drain charges nothing.
    """

    async def compute(call: ReceivedRequest) -> None:
        for tokens in range(1, beats):
            await call.write(FrameKind.HEARTBEAT, tokens=tokens, prompt=5)
        call.tokens = 9  # computed by the time of the cancellation
        await call.replica.changed()
        await asyncio.Event().wait()

    async with world(tmp_path, activator_drain_s=1) as here:
        replica = await here.replica("a", compute, max_streams=1)
        started = asyncio.ensure_future(replica.until(lambda r: bool(r.calls) and r.calls[0].tokens == 9))
        if way == "leaves":
            await _leave_once(here, json.dumps(CHAT).encode(), started)
        elif way == "deadline":
            assert (await here.post(x_kelvin_deadline_ms="700")).status == 504
        else:
            request_task = asyncio.create_task(here.post())
            await started
            here.process.send_signal(signal.SIGTERM)
            assert (await request_task).status == 503
        (record,) = await here.control.wait_for_records(1)
        assert record.outcome == {"leaves": "cancelled", "deadline": "deadline_exceeded"}.get(way, "unavailable")
        assert record.completion_tokens == (0 if way == "drain" else 9)
        assert record.runtime_id == "a"
        await replica.until(lambda r: r.recorded == [record.request_id])


async def test_leaving_after_a_large_body_is_noticed(tmp_path: Path) -> None:
    """A body larger than the read buffer pauses the socket, and a paused socket would hide the disconnect."""
    body = json.dumps(CHAT | {"stream": True, "model": "m@next", "pad": "x" * 700_000}).encode()

    async with world(tmp_path) as here:
        replica = await here.replica("a", silent, version=OTHER)
        started = asyncio.ensure_future(replica.until(lambda r: len(r.calls) == 1))
        await _leave_once(here, body, started)
        await replica.until(lambda r: len(r.deleted) == 1)


async def test_leaving_while_queued_gives_the_place_up(tmp_path: Path) -> None:
    """A request that leaves the queue never reaches the runtime, and the next one moves up."""
    held = Held()

    async with world(tmp_path) as here:
        replica = await here.replica("a", held, max_streams=1)
        first = asyncio.create_task(here.post())
        await replica.until(lambda r: len(r.calls) == 1)
        await here.control.wait_for_stat(1.0)
        left = asyncio.ensure_future(_queued(here, 2))
        await _leave_once(here, STREAM, left)
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.runtime_id) == ("cancelled", None)
        third = asyncio.create_task(here.post())
        held.release()
        assert (await first).status == (await third).status == 200
        assert len(replica.calls) == 2


async def _queued(here: ActivatorWorld, count: int) -> None:
    """Wait until the load reports have that concurrency."""
    await eventually(lambda: any(stat.concurrency > count - 0.5 for stat in here.control.stats))


async def test_leaving_while_cold_ends_the_waking(tmp_path: Path) -> None:
    """The only waiting client disconnects: no more wake calls are sent, and the concurrency is reported as zero."""

    async with world(tmp_path) as here:
        await _leave_once(here, STREAM, asyncio.ensure_future(here.control.wait_for_stat(1.0)))
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.runtime_id) == ("cancelled", None)
        await here.control.wait_for_stat(0.0, 2)  # a wait of less than a second is subtracted after its wake call
        posts = len(here.control.posts)
        await asyncio.sleep(2.2)
        assert len(here.control.posts) == posts


async def test_leaving_during_a_cold_heartbeat_is_noticed(tmp_path: Path) -> None:
    """The disconnect is noticed although heartbeats have committed the 200."""

    async with world(tmp_path) as here:
        reader, writer = await here.raw(http(STREAM))
        await reader.readuntil(b": waiting")
        writer.transport.abort()
        (record,) = await here.control.wait_for_records(1)
        assert record.outcome == "cancelled"


async def test_leaving_while_a_slot_is_granted_leaks_nothing(tmp_path: Path) -> None:
    """Many clients come and go while one slot moves between them. At the end it is free, and nothing runs."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", max_streams=1)

        async def come_and_go(turn: int) -> None:
            _, writer = await here.raw(http(STREAM))
            await writer.drain()
            await asyncio.sleep(0.001 * (turn % 7))
            writer.transport.abort()

        for _ in range(3):
            await asyncio.gather(*(come_and_go(turn) for turn in range(30)))
        assert (await here.post()).status == 200
        await replica.until(lambda r: r.running == 0)
        assert replica.max_running == 1
