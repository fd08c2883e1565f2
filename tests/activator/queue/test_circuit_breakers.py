"""Circuit breakers over HTTP: responses while a version does not start, the trial request, and other versions."""

import asyncio
import re
from pathlib import Path

import pytest

from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.artifact_errors import ProbeFailed, WeightsDamaged
from kelvin.contracts.serving.control_messages import RestoreFailure
from tests.activator.control import OTHER, VERSION
from tests.activator.replica import ReceivedRequest
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world


def failure(code: str) -> RestoreFailure:
    """Return a failed start with this code."""
    return RestoreFailure(tenant="default", version=VERSION, code=code, status=500, message="it is", retryable=False)


async def fails(here: ActivatorWorld, code: str) -> ReceivedResponse:
    """Send a request whose start fails with this code. Repeat it while the breaker is open."""
    async with asyncio.timeout(60):
        while True:
            request_task = asyncio.create_task(here.post())
            while not (await here.metric_value("kelvin_requests_queued") or request_task.done()):
                await asyncio.sleep(0.005)
            if not request_task.done():
                here.control.publish(failures=(failure(code),))
            got = await request_task
            if got.code != "breaker_open":
                return got


def _is_of(record: RequestRecord, got: ReceivedResponse) -> bool:
    return record.request_id == got.headers["x-request-id"]


async def openings(here: ActivatorWorld) -> dict[str, float]:
    """Return the number of openings of version breakers, by reason."""
    series = await here.series("kelvin_breaker_openings_total")
    return {labels["why"]: value for labels, value in series if labels["of"] == "version"}


async def refused_after(here: ActivatorWorld, times: int) -> tuple[ReceivedResponse, int]:
    """Return the refusal after so many failed starts or more, and their number. A slow machine may need more."""
    tried = 0
    while True:
        assert (await fails(here, "chunk_corrupt")).code == "chunk_corrupt"
        tried += 1
        if tried >= times:
            got = await here.post(x_kelvin_deadline_ms="500")
            if got.code != "deadline_exceeded":
                return got, tried


async def test_a_failed_integrity_check_opens_at_once(tmp_path: Path) -> None:
    """Its caller gets the failure, the next one 503 with a retry time. Other versions and replicas are served."""

    async with world(tmp_path) as here:
        got, tried = await refused_after(here, 1)
        assert (got.status, got.code) == (503, "breaker_open")
        assert "chunk_corrupt" in got.body.decode()
        assert 1 <= int(got.headers["retry-after"]) <= 30
        assert got.headers["x-should-retry"] == "false", "the failure is not retryable either"
        assert await openings(here) == {"chunk_corrupt": tried}
        count = 1
        while not (found := [each for each in await here.control.wait_for_records(count) if _is_of(each, got)]):
            count = len(here.control.records) + 1
        (record,) = found
        assert (record.outcome, record.status, record.runtime_id) == ("breaker_open", 503, None)
        await here.replica("b", version=OTHER)
        other = CHAT | {"model": f"m@{OTHER[:12]}"}
        assert (await here.post(body=other)).status == 200, "another version is not affected"
        await here.replica("a")
        assert (await here.post()).status == 200, "an existing replica is used"
        assert [value for _, value in await here.series("kelvin_versions_failing")] == [0], (
            "its answer closes the breaker"
        )


async def test_breaker_open_time_is_bounded(tmp_path: Path) -> None:
    """KELVIN_BREAKER_S is the bound. After three openings it would be 4 s."""

    async with world(tmp_path, breaker_s=1) as here:
        got, _ = await refused_after(here, 3)
        after_s = re.search(r"not tried again for (.*?) s", got.body.decode())
        assert after_s is not None
        assert float(after_s[1]) <= 1.0
        assert got.headers["retry-after"] == "1"


async def test_control_other_failures_open_only_in_a_row(tmp_path: Path) -> None:
    """Overload never opens it. Two other failures don't, and the third in a row does."""

    async with world(tmp_path) as here:
        for _ in range(5):
            assert (await fails(here, "overloaded")).code == "overloaded"
        for _ in range(2):
            assert (await fails(here, "unavailable")).code == "unavailable"
        assert await openings(here) == {}
        assert (await fails(here, "unavailable")).code == "unavailable"
        assert await openings(here) == {"unavailable": 1}


async def test_while_it_is_half_open_one_request_tries(tmp_path: Path) -> None:
    """Other requests are refused at once. When the start succeeds the trial is answered, and then all are."""

    async with world(tmp_path) as here:
        await fails(here, "chunk_corrupt")
        trying = await _waiting_trial(here)
        refused = await asyncio.gather(*(here.post() for _ in range(8)))
        assert {(got.status, got.code) for got in refused} == {(503, "breaker_open")}
        assert "is being tried" in refused[0].body.decode()
        await here.replica("a")
        assert (await trying).status == 200
        assert {got.status for got in await asyncio.gather(*(here.post() for _ in range(8)))} == {200}


async def test_abandoned_trial_makes_room_for_the_next(tmp_path: Path) -> None:
    """The trial's deadline ends it without a verdict."""

    async with world(tmp_path) as here:
        await fails(here, "probe_failed")
        trying = await _waiting_trial(here, x_kelvin_deadline_ms="1500")
        assert (await trying).code == "deadline_exceeded"
        again = await _waiting_trial(here)
        await here.replica("a")
        assert (await again).status == 200


async def _waiting_trial(here: ActivatorWorld, **headers: str) -> "asyncio.Task[ReceivedResponse]":
    """Return the first request that is admitted, once it waits."""
    async with asyncio.timeout(60):
        while True:
            request_task = asyncio.create_task(here.post(**headers))
            while not request_task.done():
                if await here.metric_value("kelvin_requests_queued"):
                    return request_task
            assert request_task.result().code == "breaker_open", request_task.result()


@pytest.mark.parametrize(
    ("replica_failure", "want"),
    [
        pytest.param(ProbeFailed(VERSION, "other logits"), {"probe_failed": 1}, id="a failed probe"),
        pytest.param(WeightsDamaged(VERSION), {}, id="damaged memory"),
    ],
)
async def test_probe_failure_opens_the_version_breaker(
    tmp_path: Path, replica_failure: ProbeFailed | WeightsDamaged, want: dict[str, int]
) -> None:
    """A failed probe opens the version's breaker at once. Damaged memory concerns that replica only."""

    async with world(tmp_path) as here:

        async def confess(call: ReceivedRequest) -> None:
            await call.fail(replica_failure)
            here.control.publish(removed=("a",))

        await here.replica("a", confess)
        request_task = asyncio.create_task(here.post())
        if want:
            assert (await request_task).code == "probe_failed"
        else:
            await here.replicas[0].until(lambda replica: len(replica.calls) == 1)
            await here.replica("b")
            assert (await request_task).status == 200
        assert await openings(here) == want
