"""A replica refuses, fails, is lost, or has damaged weights: the caller is told, or another replica answers once."""

import asyncio
import json
from pathlib import Path

import pytest

from kelvin.contracts.artifact_errors import WeightsDamaged
from kelvin.contracts.errors import Internal, LimitExceeded
from kelvin.contracts.serving.stream_frames import FrameKind
from tests.activator.control import VERSION
from tests.activator.replica import ReceivedRequest, chunk, cut, refuses
from tests.activator.world import CHAT, STREAM, world


async def test_a_refusal_of_the_runtime_keeps_its_status(tmp_path: Path) -> None:
    """A refusal before compute reaches the caller unchanged, with a record."""

    async with world(tmp_path) as here:
        await here.replica("a", refuses(LimitExceeded("max_tokens", 9, 4, "tokens")))
        got = await here.post(body=STREAM)
        assert (got.status, got.code) == (400, "context_length_exceeded")
        assert got.json["error"]["param"] == "max_tokens"  # type: ignore[index]
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.status) == ("context_length_exceeded", 400)


async def test_a_failure_of_the_runtime_ends_the_stream(tmp_path: Path) -> None:
    """A FAILED frame after tokens becomes the terminal event. The tokens delivered before it are counted."""

    async def fail(call: ReceivedRequest) -> None:
        await call.data(chunk("x"), 1)
        await call.fail(Internal(), 2)

    async with world(tmp_path) as here:
        await here.replica("a", fail)
        got = await here.post(body=STREAM)
        assert got.status == 200
        assert b"event: error" in got.body
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.completion_tokens) == ("internal", 1)


async def test_a_replica_killed_mid_stream_ends_the_stream_with_error(tmp_path: Path) -> None:
    """The caller gets a terminal event, and the record has what was delivered."""

    async def cut_within(call: ReceivedRequest) -> None:
        await call.data(chunk("x"), 1)
        await call.data(chunk("y"), 2)
        await asyncio.sleep(0.1)
        call.cut()

    async with world(tmp_path) as here:
        await here.replica("a", cut_within)
        got = await here.post(body=STREAM)
        assert got.status == 200
        assert json.loads(got.body.split(b"data: ")[-1])["error"]["code"] == "replica_lost"
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.completion_tokens, record.runtime_id) == ("replica_lost", 2, "a")


async def test_a_clean_end_without_the_last_frame_is_no_end(tmp_path: Path) -> None:
    """A body without an END frame counts as a lost replica, so truncation is not hidden."""

    async def truncate(call: ReceivedRequest) -> None:
        await call.data(chunk("x"), 1)

    async with world(tmp_path) as here:
        await here.replica("a", truncate)
        got = await here.post(body=STREAM)
        assert b"replica_lost" in got.body
        assert b"[DONE]" not in got.body


async def test_a_replica_lost_before_its_first_byte_is_replaced(tmp_path: Path) -> None:
    """Nothing was sent, so another replica answers. The caller sees only that answer."""

    async with world(tmp_path) as here:
        lost = await here.replica("a", cut)
        request_task = asyncio.create_task(here.post(body=STREAM))
        await lost.until(lambda replica: len(replica.calls) == 1)
        await here.replica("b")
        got = await request_task
        assert got.status == 200
        assert b"[DONE]" in got.body
        records = await here.control.wait_for_records(1)
        assert [(record.outcome, record.runtime_id) for record in records] == [("ok", "b")]


@pytest.mark.parametrize("stream", [False, True])
async def test_unsent_response_of_damaged_weights_is_retried(tmp_path: Path, stream: bool) -> None:
    """The client has none of it, so another replica answers. The first one's work is not charged."""

    async def spoil(call: ReceivedRequest) -> None:
        await call.write(FrameKind.HEARTBEAT, tokens=1)
        if not stream:
            await call.data(b'{"wrong": ', 2)
        await call.fail(WeightsDamaged(VERSION), 2)

    async with world(tmp_path) as here:
        damaged = await here.replica("a", spoil)
        request_task = asyncio.create_task(here.post(body=STREAM if stream else CHAT))
        await damaged.until(lambda replica: len(replica.calls) == 1)
        await here.replica("b")
        got = await request_task
        assert (got.status, b"wrong" in got.body, b"error" in got.body) == (200, False, False)
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.runtime_id, record.completion_tokens) == ("ok", "b", 2)
        assert record.device_us == 20, "the work of the replica that answered"
        assert await here.metric_value("kelvin_breaker_openings_total", of="replica", why="weights_damaged") == 1


async def test_control_sent_response_of_damaged_weights_fails(tmp_path: Path) -> None:
    """Control: no other replica can take back sent bytes, so the stream ends with the error."""

    async def spoil(call: ReceivedRequest) -> None:
        await call.data(chunk("x"), 1)
        await call.fail(WeightsDamaged(VERSION), 2)

    async with world(tmp_path) as here:
        await here.replica("a", spoil)
        got = await here.post(body=STREAM)
        assert json.loads(got.body.split(b"data: ")[-1])["error"]["code"] == "weights_damaged"
        assert b"[DONE]" not in got.body
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.completion_tokens) == ("weights_damaged", 1)
