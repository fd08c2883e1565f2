"""Deadlines over HTTP: a deadline that can't be met is refused at once, and queued streams are told the wait."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from activator.queue.policy.wait_estimate import MIN_ANSWERS
from kelvin.contracts.serving.start_forecast import Forecast, StartRow
from tests.activator.control import KEY, VERSION
from tests.activator.replica import Held
from tests.activator.world import CHAT, STREAM, world

NAMES = {"tenant": "default", "model": "m", "version": VERSION}
SLOW = StartRow(start_ms=40_000, **NAMES)


@pytest.mark.parametrize("body", [pytest.param(CHAT, id="whole"), pytest.param(STREAM, id="streamed")])
async def test_a_start_that_takes_longer_is_refused_at_once_and_begun(tmp_path: Path, body: dict[str, object]) -> None:
    """503 has the time after which it could be served. The start begins all the same, so the next caller is served."""

    async with world(tmp_path) as here:
        await here.publish(starts=(SLOW,))
        got = await here.post(body=body, x_kelvin_deadline_ms="30000")
        assert (got.status, got.code) == (503, "deadline_too_short")
        assert (got.headers["retry-after"], got.headers["x-kelvin-expected-wait-ms"]) == ("40", "40000")
        message = json.loads(got.body)["error"]["message"]
        assert re.fullmatch(
            r"no answer can begin within the (29\.\d|30) s that are left: the model's start takes 40 s", message
        )
        await here.control.wait_for_stat(1.0)
        (record,) = await here.control.wait_for_records(1)
        assert (record.outcome, record.status, record.runtime_id) == ("deadline_too_short", 503, None)
        await here.replica("a")
        assert (await here.post(x_kelvin_deadline_ms="30000")).status == 200


@pytest.mark.parametrize(
    ("known", "deadline_ms"),
    [
        pytest.param((), "30000", id="nothing is known of the start"),
        pytest.param((SLOW,), "50000", id="the deadline is long enough"),
        pytest.param((SLOW,), None, id="the installation's own deadline is long"),
    ],
)
async def test_request_not_known_to_be_late_waits(
    tmp_path: Path, known: tuple[StartRow, ...], deadline_ms: str | None
) -> None:
    """Negative control: the same request waits and is served by the replica that comes in time."""

    async with world(tmp_path) as here:
        await here.publish(starts=known)
        headers = {} if deadline_ms is None else {"x_kelvin_deadline_ms": deadline_ms}
        request_task = asyncio.create_task(here.post(**headers))
        await here.control.wait_for_stat(1.0)
        await here.replica("a", waits_until_read=False)
        assert (await request_task).status == 200


async def test_running_start_uses_its_own_forecast(tmp_path: Path) -> None:
    """The forecast of a running start replaces the usual duration."""

    async with world(tmp_path) as here:
        await here.publish(
            starts=(SLOW,), forecasts=(Forecast(tenant="default", model="m", version=VERSION, ready_in_ms=1000),)
        )
        request_task = asyncio.create_task(here.post(x_kelvin_deadline_ms="30000"))
        await here.control.wait_for_stat(1.0)
        await here.replica("a", waits_until_read=False)
        assert (await request_task).status == 200


async def test_queued_stream_reports_its_remaining_wait(tmp_path: Path) -> None:
    """Once the throughput is known, each heartbeat of a queued stream has the remaining time."""
    held = Held()

    async with world(tmp_path) as here:
        replica = await here.replica("a", max_streams=1)
        for _ in range(MIN_ANSWERS):
            assert (await here.post()).status == 200
        replica.script = held
        first = asyncio.create_task(here.post())
        await replica.until(lambda r: len(r.calls) == MIN_ANSWERS + 1)
        own = {"authorization": f"Bearer {KEY}"}
        async with here.client.post(f"{here.url}/v1/chat/completions", json=STREAM, headers=own) as queued:
            beat = await queued.content.readline()
            assert re.fullmatch(rb": waiting stage=queued elapsed_s=[0-9.]+ remaining_s=[0-9.]+\n", beat), beat
            held.release()
            assert (await first).status == 200
            assert b"[DONE]" in await queued.read()


@pytest.mark.parametrize(
    ("most_s", "asked_ms", "installation_s", "within_ms"),
    [
        pytest.param(500, None, 600, 500_000, id="the tenant's, without a header"),
        pytest.param(500, "550000", 600, 500_000, id="the tenant's, below the header's"),
        pytest.param(500, "400000", 600, 400_000, id="the header's, below the tenant's"),
        pytest.param(500, None, 400, 400_000, id="the installation's, below the tenant's"),
        pytest.param(None, "550000", 600, 550_000, id="the header's, without a tenant's"),
    ],
)
async def test_the_smallest_deadline_holds(
    tmp_path: Path, most_s: int | None, asked_ms: str | None, installation_s: int, within_ms: int
) -> None:
    """The replica is told that deadline. A start that takes longer refuses the request at once."""

    async with world(tmp_path, deadline_s=installation_s) as here:
        await here.limit(deadline_max_s=most_s)
        start_ms = within_ms + 1000
        await here.publish(starts=(StartRow(start_ms=start_ms, **NAMES),))
        headers = {} if asked_ms is None else {"x_kelvin_deadline_ms": asked_ms}
        refused = await here.post(**headers)
        assert (refused.status, refused.code) == (503, "deadline_too_short")
        replica = await here.replica("a")
        assert (await here.post(**headers)).status == 200
        told_ms = int(replica.calls[-1].headers["x-kelvin-deadline-ms"])
        assert within_ms - 60_000 < told_ms <= within_ms
