"""Attempts over HTTP: retries after a failure before the first byte, retry budgets, and what is recorded."""

import asyncio
import resource
from pathlib import Path

import pytest
from aiohttp import web

from kelvin.contracts.serving.control_messages import ModelRow
from kelvin.contracts.serving.stream_frames import CONTENT_TYPE, FrameKind
from tests.activator.control import OTHER, VERSION, replica_row
from tests.activator.replica import Held, ReceivedRequest, Script, cut, decline, hello
from tests.activator.world import ActivatorWorld, world

BUDGET = 10  # the retry budget of an idle version


async def cut_behind_head(call: ReceivedRequest) -> None:
    """Send the headers of a 200, then break. The replica has counted the request, so its record must name it."""
    assert call.request.transport is not None
    call.request.transport.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: " + CONTENT_TYPE.encode() + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    call.cut()


async def cut_behind_beat(call: ReceivedRequest) -> None:
    """Send a heartbeat and break the connection. The replica has counted the request here too."""
    await call.write(FrameKind.HEARTBEAT)
    call.cut()


async def retries(here: ActivatorWorld) -> dict[tuple[str, str], float]:
    """Return the retries by failure and consequence."""
    series = await here.series("kelvin_retries_total")
    return {(labels["failure"], labels["then"]): value for labels, value in series}


async def test_a_refusal_is_tried_again_elsewhere_and_counted(tmp_path: Path) -> None:
    """The caller gets the other replica's answer. There is one retry in the metrics and one usage record."""

    async with world(tmp_path) as here:
        script = Held(decline)
        draining = await here.replica("a", script)
        request_task = asyncio.create_task(here.post())
        await draining.until(lambda replica: len(replica.calls) == 1)
        other = await here.replica("b")
        script.release()
        assert (await request_task).status == 200
        assert await retries(here) == {("unavailable", "again"): 1}
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.runtime_id, record.completion_tokens) == ("ok", "b", 2)
        assert draining.calls[0].request_id == other.calls[0].request_id, "both attempts have one id"
        await other.until(lambda replica: replica.recorded == [record.request_id])
        assert not draining.recorded, "the record names the other replica"


async def test_the_last_failure_is_told_when_the_budget_is_spent(tmp_path: Path) -> None:
    """Of many requests that fail at once, as many are retried as the budget allows. The others get the failure."""

    count = 48
    async with world(tmp_path) as here:
        arrived = asyncio.Event()

        async def together(call: ReceivedRequest) -> None:
            if len(call.replica.calls) > count:
                await hello(call)
                return
            if len(call.replica.calls) == count:
                arrived.set()
            await arrived.wait()
            await decline(call)

        await here.replica("a", together, max_streams=count)
        got = await asyncio.gather(*(here.post() for _ in range(count)))
        answered = sum(each.status == 200 for each in got)
        refused = [each for each in got if each.status != 200]
        # A tenth of them, and the budget that a slow machine's seconds add, come on top.
        assert BUDGET <= answered < count, answered
        assert {(each.status, each.code, each.headers["retry-after"]) for each in refused} == {
            (503, "unavailable", "1")
        }
        assert await retries(here) == {
            ("unavailable", "again"): answered,
            ("unavailable", "budget"): count - answered,
        }
        records = await here.control.wait_for_records(count)
        assert len({record.request_id for record in records}) == len(records) == count
        assert {record.runtime_id for record in records if record.outcome == "unavailable"} == {None}


@pytest.mark.parametrize(
    ("fail", "begun"),
    [
        pytest.param(cut, False, id="nothing was sent"),
        pytest.param(cut_behind_head, True, id="a head"),
        pytest.param(cut_behind_beat, True, id="a heartbeat"),
    ],
)
async def test_nothing_is_tried_again_after_the_first_byte(tmp_path: Path, fail: Script, begun: bool) -> None:
    """Control: without that byte the request is retried. The record names the replica that counted the request."""

    async with world(tmp_path) as here:
        script = Held(fail)
        first = await here.replica("a", script)
        request_task = asyncio.create_task(here.post())
        await first.until(lambda replica: len(replica.calls) == 1)
        second = await here.replica("b")
        script.release()
        got = await request_task
        assert (got.status, len(second.calls)) == ((502, 0) if begun else (200, 1))
        assert await retries(here) == ({} if begun else {("replica_lost", "again"): 1})
        (record,) = await here.control.wait_for_records(1)
        assert record.runtime_id == ("a" if begun else "b")


async def test_activator_without_descriptors_blames_no_replica(tmp_path: Path) -> None:
    """The answer is 503 `overloaded`. No breaker counts the failure, and the record names no replica."""
    async with world(tmp_path) as here:
        await here.replica("a")
        assert (await here.post()).status == 200, "records have a file, and the client's connection is kept"
        await here.publish(replica_row("a", draining=True))
        await here.replica("b")
        pid = here.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = set[int]()
        while used != (found := {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}):
            used = found  # until connections of earlier calls are closed
            await asyncio.sleep(0.2)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), before[1]))
        try:
            refused = [await here.post() for _ in range(3)]
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert {(got.status, got.code) for got in refused} == {(503, "overloaded")}
        assert (await here.post()).status == 200
        records = await here.control.wait_for_records(5)
        assert {record.runtime_id for record in records if record.outcome == "overloaded"} == {None}
        assert await here.metric_value("kelvin_breaker_openings_total", of="replica") == 0


async def test_request_is_lost_with_three_replicas_at_most(tmp_path: Path) -> None:
    """The third lost replica is the last one tried, because the request may be what ends them."""

    async with world(tmp_path) as here:
        lost = [await here.replica(name, cut) for name in "abcde"]
        got = await here.post()
        assert (got.status, got.code) == (502, "replica_lost")
        assert sum(len(replica.calls) for replica in lost) == 3
        assert await retries(here) == {("replica_lost", "again"): 2, ("replica_lost", "tries"): 1}
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.runtime_id) == ("replica_lost", None)


async def test_requests_of_an_ended_replica_wait_for_a_start(tmp_path: Path) -> None:
    """A replica ended, and the feed doesn't say so. Its requests were never sent, so they wait for another replica
    beyond the retry time and use no retry budget.
    """

    async with world(tmp_path) as here:
        await here.publish(replica_row("ended"))
        request_tasks = [asyncio.create_task(here.post()) for _ in range(12)]
        await asyncio.sleep(5.5)
        assert not any(each.done() for each in request_tasks)
        await here.replica("new")
        assert {(await each).status for each in request_tasks} == {200}
        assert set(await retries(here)) == {("replica_lost", "again")}


async def test_a_deadline_ends_the_wait_for_another_replica(tmp_path: Path) -> None:
    """The one slot of the failed replica is free afterwards."""

    async with world(tmp_path) as here:
        script = Held(decline)
        only = await here.replica("a", script, max_streams=1)
        request_task = asyncio.create_task(here.post(x_kelvin_deadline_ms="2000"))
        await only.until(lambda replica: len(replica.calls) == 1)
        await here.publish(removed=("a",))
        script.release()
        got = await request_task
        assert (got.status, got.code) == (504, "deadline_exceeded")
        only.script = hello
        await here.publish(replica_row("a", 1))
        assert (await here.post()).status == 200


async def test_only_waits_for_a_start_outlast_the_retry_time(tmp_path: Path) -> None:
    """A request whose replica keeps refusing gets the refusal within the retry time. An earlier one whose replica is
    gone waits for a start and is answered.
    """
    other = {"model": f"m@{OTHER[:12]}", "messages": [{"role": "user", "content": "hi"}]}

    async with world(tmp_path) as here:
        gone = await here.replica("gone", script := Held(cut), version=OTHER)
        waits = asyncio.create_task(here.post(body=other))
        await gone.until(lambda replica: len(replica.calls) == 1)
        await here.publish(removed=("gone",))
        script.release()
        await here.wait_for_metric("kelvin_retries_total", 1, failure="replica_lost", then="again")

        only = await here.replica("a", decline)
        got = await here.post()
        assert (got.status, got.code, got.headers["retry-after"]) == (503, "unavailable", "1")
        counted = await retries(here)
        assert counted["unavailable", "time"] == 1, "eight tries would take two minutes"
        assert counted.get(("unavailable", "again"), 0) + 1 >= len(only.calls) >= 1

        assert not waits.done()
        await here.replica("new", version=OTHER, waits_until_read=False)
        assert (await waits).status == 200


@pytest.mark.parametrize("named", ["pod-1-5f3a", None])
async def test_record_names_the_runtime_id_the_pod_reports(tmp_path: Path, named: str | None) -> None:
    """The feed knows the pod, whose containers may restart. The replica counts the request under its current runtime
    id. Control: without a reported id the record has the feed's name.
    """

    async def answer(call: ReceivedRequest) -> None:
        fields = {"content-type": CONTENT_TYPE} | ({} if named is None else {"x-kelvin-runtime": named})
        call.answer = web.StreamResponse(headers=fields)
        await call.answer.prepare(call.request)
        await hello(call)

    async with world(tmp_path) as here:
        await here.replica("a", answer)
        assert (await here.post()).status == 200
        (record,) = await here.control.wait_for_records(1)
        assert record.runtime_id == (named or "a")


MOVED = ModelRow(tenant="default", model="m", aliases={"prod": OTHER}, created_at_s=7)
DELETED = (("default", "m", VERSION),)


@pytest.mark.parametrize("removed", [pytest.param((), id="alias moved"), pytest.param(DELETED, id="version deleted")])
async def test_retry_goes_to_the_version_that_the_alias_names_by_then(
    tmp_path: Path, removed: tuple[tuple[str, str, str], ...]
) -> None:
    """A deploy happens during the first attempt. The retry neither waits for a deleted version nor wakes an old one."""

    async with world(tmp_path) as here:
        script = Held(decline)
        first = await here.replica("a", script)
        request_task = asyncio.create_task(here.post())
        await first.until(lambda replica: len(replica.calls) == 1)
        await here.replica("b", is_published=False)
        await here.publish(replica_row("b", version=OTHER), removed=("a",), models=(MOVED,), removed_versions=removed)
        script.release()
        got = await asyncio.wait_for(request_task, 20)
        assert (got.status, got.headers["x-kelvin-version"]) == (200, OTHER)
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.version, record.runtime_id) == ("ok", OTHER, "b")


@pytest.mark.parametrize(
    ("model", "want"),
    [
        pytest.param("m", 200, id="by alias: the other version answers"),
        pytest.param(f"m@{VERSION[:12]}", 404, id="by version: there is none"),
    ],
)
async def test_waiter_of_a_deleted_version_is_resolved_again(tmp_path: Path, model: str, want: int) -> None:
    """The request waits for a start. Then its version is deleted, and the alias names another one."""

    async with world(tmp_path) as here:
        request_task = asyncio.create_task(here.post(body={"model": model, "messages": []}))
        await here.control.wait_for_stat()
        await here.replica("b", is_published=False)
        here.control.publish(replica_row("b", version=OTHER), models=(MOVED,), removed_versions=DELETED)
        got = await asyncio.wait_for(request_task, 20)
        assert got.status == want
        if want == 404:
            assert got.code == "model_not_found"


def _foreign(status: int, body: bytes, content_type: str = "text/html") -> Script:
    """Return a script that answers like a proxy in front of the replica."""

    async def script(call: ReceivedRequest) -> None:
        call.refusal = web.Response(status=status, body=body, content_type=content_type)

    return script


JSON = "application/json"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_foreign(502, b"<html>bad gateway</html>"), id="a proxy's HTML"),
        pytest.param(_foreign(502, b""), id="an empty error"),
        pytest.param(_foreign(504, b"x" * (1 << 20), "text/plain"), id="an error without end"),
        pytest.param(_foreign(503, b"upstream connect error", "text/plain"), id="a sidecar's 503"),
        pytest.param(_foreign(404, b'{"error": {"message": "no route"}}', JSON), id="an error object of a proxy"),
        pytest.param(
            _foreign(400, b'{"error": {"message": "no", "request_id": "req_other"}}', JSON),
            id="an error object about another request",
        ),
        pytest.param(_foreign(500, b"[" * 50_000, JSON), id="JSON nested deeply"),
        pytest.param(_foreign(200, b"<html>welcome</html>"), id="a 200 that carries no frames"),
        pytest.param(_foreign(302, b"", "text/plain"), id="a redirect"),
    ],
)
async def test_answer_of_no_runtime_is_retried_elsewhere(tmp_path: Path, script: Script) -> None:
    """No runtime accepted the request, so another replica may. If there is none, the caller gets a retryable failure,
    never an internal one.
    """

    async with world(tmp_path) as here:
        held = Held(script)
        first = await here.replica("a", held)
        request_task = asyncio.create_task(here.post())
        await first.until(lambda replica: len(replica.calls) == 1)
        other = await here.replica("b")
        held.release()
        assert (await request_task).status == 200
        here.control.publish(removed=("b",))
        await other.stop()
        await here.settled()
        await here.control.wait_for_records(1)
        got = await here.post(x_kelvin_deadline_ms="4000")
        assert got.status in (503, 504)
        assert got.code in ("replica_lost", "unavailable", "deadline_exceeded")
