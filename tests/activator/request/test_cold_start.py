"""Requests to a version without replicas: the wake call, heartbeats, and failures with their own status."""

import asyncio
import json
import re
import time
from pathlib import Path

import msgspec
import pytest

from activator.queue import waker
from kelvin.contracts.serving.control_messages import RestoreFailure, StartProblem, StartProblemRow
from kelvin.contracts.serving.start_forecast import Forecast
from kelvin.contracts.timeline import Stage
from tests.activator.control import STRANGER, VERSION
from tests.activator.world import CHAT, STREAM, ActivatorWorld, ReceivedResponse, world
from tests.eventually import eventually

FAILURE = RestoreFailure(
    tenant="default", version=VERSION, code="chunk_corrupt", status=500, message="chunk x is corrupt", retryable=False
)


async def test_a_cold_stream_is_told_every_second_what_it_waits_for(tmp_path: Path) -> None:
    """After one second the stream gets 200 and a heartbeat each second, then the answer and its timeline."""

    async with world(tmp_path) as here:
        request_task = asyncio.create_task(here.post(body=STREAM))
        await here.control.wait_for_stat(1.0)
        began = time.monotonic()
        await asyncio.sleep(2.5)
        await here.replica("a", waits_until_read=False)
        got = await request_task
        events = got.body.split(b"\n\n")
        beats = [event for event in events if event.startswith(b": waiting")]
        assert [re.sub(rb"\.\d", b"", beat) for beat in beats[:2]] == [
            b": waiting stage=restoring elapsed_s=1",
            b": waiting stage=restoring elapsed_s=2",
        ]
        assert got.status == 200
        assert events[-2] == b"data: [DONE]"
        timeline = json.loads(events[-3].removeprefix(b": timeline "))
        stages = [stamp["stage"] for stamp in timeline["stamps"]]
        assert stages == [
            "routed", "poked", "decided", "promoted", "ready", "dispatched", "tokenized", "prefilled",
            "first_token", "done",
        ]  # fmt: skip
        assert timeline["cold"]
        assert time.monotonic() - began < 10
        (record,) = await here.control.wait_for_records(1)
        assert record.timeline is not None
        assert record.queued_us > 2_000_000
        first = here.control.posts[0].stats[0]
        assert (first.concurrency, first.requests, first.version) == (1.0, 1, VERSION)


async def test_version_is_woken_while_a_tenant_asks_for_timelines(tmp_path: Path) -> None:
    """One tenant's slow lookups are limited to 64. Further ones are refused, and wake calls are still sent."""

    async with world(tmp_path) as here:
        here.control.fall_silent("/internal/v1/requests/")
        request_tasks = [asyncio.create_task(here.get(f"/v1/requests/r{number}/timeline")) for number in range(80)]
        await eventually(lambda: sum(task.done() for task in request_tasks) >= 16)
        assert {task.result().code for task in request_tasks if task.done()} == {"tenant_busy"}
        cold = asyncio.create_task(here.post(key=STRANGER, body=CHAT | {"model": "theirs"}))
        await here.control.wait_for_stat(1.0)
        assert sum(not task.done() for task in request_tasks) == 64
        for task in (cold, *request_tasks):
            task.cancel()


async def test_start_of_a_pod_is_told_as_cold(tmp_path: Path) -> None:
    """A Knative pod's row has no restore stages. The request that waited for it is cold, and the next one is warm."""

    async with world(tmp_path) as here:
        request_task = asyncio.create_task(here.post())
        await here.control.wait_for_stat(1.0)
        await here.replica("a", restore=(), waits_until_read=False)
        cold, warm = await request_task, await here.post()
        assert (cold.status, warm.status) == (200, 200)
        for got, want in ((cold, True), (warm, False)):
            shown = await here.get(f"/v1/requests/{got.headers['x-request-id']}/timeline")
            assert shown.json["cold"] is want
            stages = [stamp["stage"] for stamp in shown.json["stamps"]]  # type: ignore[attr-defined]
            assert (stages[1:3] == ["poked", "ready"]) is want, stages
        first, second = await here.control.wait_for_records(2)
        assert first.timeline is not None
        assert second.timeline is None
        assert 'start="cold"' in await here.page()


async def test_a_cold_stream_is_told_how_long_it_will_be(tmp_path: Path) -> None:
    """Each heartbeat has the forecast time, less the time since."""

    async with world(tmp_path) as here:
        request_task = asyncio.create_task(here.post(body=STREAM))
        await here.control.wait_for_stat(1.0)
        said = Forecast(tenant="default", model="m", version=VERSION, ready_in_ms=60_000, bytes_to_bring=7, tier="nvme")
        here.control.publish(forecasts=(said,))
        await asyncio.sleep(1.2)
        await here.replica("a", waits_until_read=False)
        got = await request_task
        beat = next(event for event in got.body.split(b"\n\n") if event.startswith(b": waiting"))
        found = re.fullmatch(
            rb": waiting stage=restoring elapsed_s=([0-9.]+) remaining_s=([0-9.]+) tier=nvme bytes=7", beat
        )
        assert found is not None, beat
        assert 30.0 < float(found[2]) <= 60.0


async def test_the_poke_precedes_every_other_report(tmp_path: Path) -> None:
    """The first stat of a cold request is sent at once, not with the next second's report."""

    async with world(tmp_path) as here:
        delays_s = []
        for turn in range(3):
            began = time.monotonic()
            request_task = asyncio.create_task(here.post())
            await here.control.wait_for_stat(1.0, turn + 1)
            delays_s.append(time.monotonic() - began)
            await here.replica(f"r{turn}", waits_until_read=False)
            assert (await request_task).status == 200
            await here.publish(removed=(f"r{turn}",))
            # Forgotten after an idle second, so that the next request is a first one again.
            await here.control.wait_for_stat(0.0, turn + 1)
        assert min(delays_s) < 0.2, delays_s


async def test_a_cold_answer_that_does_not_stream_waits_with_its_head(tmp_path: Path) -> None:
    """Without a stream there are no heartbeats. The response waits, and Server-Timing shows the start."""

    async with world(tmp_path) as here:
        request_task = asyncio.create_task(here.post())
        await here.control.wait_for_stat(1.0)
        await asyncio.sleep(1.2)
        await here.replica("a", waits_until_read=False)
        got = await request_task
        assert got.status == 200
        assert got.body.startswith(b"{")
        assert "ready;dur=" in got.headers["server-timing"]
        shown = await here.get(f"/v1/requests/{got.headers['x-request-id']}/timeline")
        assert {stamp["stage"] for stamp in shown.json["stamps"]} >= {Stage.POKED, Stage.READY}  # type: ignore[attr-defined]


NO_ROOM = StartProblem(reason="no_room", message="no replica could be started: all 2 device slots are taken")
CRASHES = StartProblem(reason="crash_loop", message="its process ended with exit status 7", exit_status=7)


@pytest.mark.parametrize("problem", [NO_ROOM, CRASHES], ids=lambda problem: problem.reason)
async def test_wait_in_vain_says_why_no_replica_came(tmp_path: Path, problem: StartProblem) -> None:
    """The reason is in a stream's heartbeats, in the error that ends the wait, and in the timeline. Without a known
    problem none of them has one.
    """
    row = StartProblemRow(tenant="default", model="m", version=VERSION, problem=problem)

    async with world(tmp_path) as here:
        unknown = await here.post(x_kelvin_deadline_ms="150")
        assert unknown.code == "deadline_exceeded"
        assert problem.message not in unknown.body.decode()
        await here.publish(start_problems=(row,))
        stream = asyncio.create_task(here.post(body=STREAM, x_kelvin_deadline_ms="1400"))
        got = await here.post(x_kelvin_deadline_ms="300")
        assert (got.status, got.code) == (504, "deadline_exceeded")
        assert problem.message in got.body.decode()
        shown = await here.get(f"/v1/requests/{got.headers['x-request-id']}/timeline")
        assert shown.json["start_problem"] == msgspec.to_builtins(problem)
        before = await here.get(f"/v1/requests/{unknown.headers['x-request-id']}/timeline")
        assert "start_problem" not in before.json
        body = (await stream).body.decode()
        assert f" reason={problem.reason}\n" in body
        assert problem.message in body


AWAY = RestoreFailure(
    tenant="default", version=VERSION, code="unavailable", status=503, message="the store", retryable=True
)


async def _fails_after(here: ActivatorWorld, seconds: float, failure: RestoreFailure = FAILURE) -> ReceivedResponse:
    request_task = asyncio.create_task(here.post(body=STREAM))
    await here.control.wait_for_stat(1.0)
    await asyncio.sleep(seconds)
    here.control.publish(failures=(failure,))
    return await request_task


async def test_a_failure_within_a_second_keeps_its_status(tmp_path: Path) -> None:
    """Before any byte is sent the caller gets the failure's own status, and so does the record."""

    async with world(tmp_path) as here:
        got = await _fails_after(here, 0.05)
        assert (got.status, got.code) == (500, "chunk_corrupt")
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.status, record.runtime_id) == ("chunk_corrupt", 500, None)
        assert record.timeline is not None


async def test_a_failure_after_a_second_is_the_streams_last_event(tmp_path: Path) -> None:
    """After 1.5 s the 200 is sent. The stream ends with the timeline and an error event, without [DONE]."""

    async with world(tmp_path) as here:
        got = await _fails_after(here, 1.5)
        assert got.status == 200
        events = [event for event in got.body.split(b"\n\n") if event]
        assert events[-1].startswith(b"event: error\ndata: ")
        assert json.loads(events[-1].split(b"data: ")[1])["error"]["code"] == "chunk_corrupt"
        assert events[-2].startswith(b": timeline ")
        assert b"[DONE]" not in got.body
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.status) == ("chunk_corrupt", 200)


async def test_after_a_failed_start_the_next_request_wakes_again(tmp_path: Path) -> None:
    """A failure ends the wake. The next request sends its own wake call at once."""

    async with world(tmp_path) as here:
        delays_s = []
        for turn in range(3):  # one turn may meet a busy machine
            assert (await _fails_after(here, 0.1, AWAY)).status == 503
            before = len(here.control.posts)
            request_task = asyncio.create_task(here.post())
            began = time.monotonic()
            while not any(s.concurrency >= 1 for post in here.control.posts[before:] for s in post.stats):
                await asyncio.sleep(0.005)
            delays_s.append(time.monotonic() - began)
            await here.replica(f"r{turn}", waits_until_read=False)
            assert (await request_task).status == 200
            if delays_s[-1] < 0.5:
                return
            await here.publish(removed=(f"r{turn}",))
        raise AssertionError(f"a start was asked for late: {delays_s}")


async def _all_inside(here: ActivatorWorld, count: int) -> None:
    """Wait until a report of a whole second has that concurrency."""
    await eventually(lambda: any(stat.concurrency > count - 0.5 for stat in here.control.stats))


async def test_two_hundred_at_zero_are_answered_by_one_wake(tmp_path: Path) -> None:
    """200 requests wait for one replica of 8 slots. All are answered, at most 8 at once. The wake call is sent once,
    and again only each AGAIN_S while they wait.
    """

    async with world(tmp_path) as here:
        began = time.monotonic()
        request_tasks = [asyncio.create_task(here.post(body=STREAM)) for _ in range(200)]
        await here.control.wait_for_stat(1.0)
        await _all_inside(here, 200)
        pokes = [s for s in here.control.stats if (s.concurrency, s.requests) in ((1.0, 1), (1.0, 0))]
        most_pokes = 1 + int((time.monotonic() - began) / waker.AGAIN_S)
        replica = await here.replica("a", waits_until_read=False)
        answers = await asyncio.gather(*request_tasks)
        assert [got.status for got in answers] == [200] * 200
        assert all(got.body.endswith(b"data: [DONE]\n\n") for got in answers)
        assert 1 <= replica.max_running <= 8
        assert 1 <= len(pokes) <= most_pokes, pokes
        records = await here.control.wait_for_records(200)
        assert sorted(record.sequence for record in records) == list(range(1, 201))
