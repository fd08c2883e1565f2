"""Hedging over TLS: a late request is answered by another replica, and one record is billed."""

import asyncio
import json
from pathlib import Path

from tests.activator.replica import ReceivedRequest, hello
from tests.activator.world import ActivatorWorld, world
from tests.eventually import eventually

SAMPLES = 100


class SlowOnce:
    """A script of several replicas: the first call after `holds` is set waits, at any replica."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.holds = False

    async def __call__(self, call: ReceivedRequest) -> None:
        if self.holds:
            self.holds = False
            await self.gate.wait()
        await hello(call)


async def _hedged(here: ActivatorWorld) -> dict[str, float]:
    return {labels["first"]: value for labels, value in await here.series("kelvin_hedged_requests_total")}


async def _measure_and_hold(here: ActivatorWorld, script: SlowOnce) -> None:
    """Serve enough requests that lateness is known. Then make one request late."""
    for name in "ab":
        await here.replica(name, script)
    for _ in range(SAMPLES):
        assert (await here.post()).status == 200
    assert await _hedged(here) == {}, "nothing is late before that"
    script.holds = True


async def test_a_late_request_is_answered_by_another_replica_and_billed_once(tmp_path: Path) -> None:
    """The record names the replica that answered. The other one records its own work. Metric and log show the hedge."""

    async with world(tmp_path, log_level="debug") as here:
        await _measure_and_hold(here, SlowOnce())
        got = await here.post()
        assert got.status == 200
        assert await _hedged(here) == {"second": 1}
        records = await here.control.wait_for_records(SAMPLES + 1)
        (record,) = [each for each in records if each.request_id == got.headers["x-request-id"]]
        assert (record.outcome, record.completion_tokens) == ("ok", 2)
        quick, slow = here.replicas if record.runtime_id == "a" else reversed(here.replicas)
        await slow.until(lambda replica: replica.answered_elsewhere == [record.request_id])
        assert quick.calls[-1].request_id == record.request_id
        await quick.until(lambda replica: record.request_id in replica.recorded)
        assert record.request_id not in slow.recorded
        assert (await here.post()).status == 200
        ended = [json.loads(line) for line in (here.data / "log").read_text().splitlines() if "hedged" in line]
        (line,) = [each for each in ended if each["hedged"] is not None]
        assert (line["request_id"], line["hedged"]) == (record.request_id, "second")


async def test_control_disabled_hedging_waits_for_one_replica(tmp_path: Path) -> None:
    """With KELVIN_HEDGE_REQUESTS=off no other replica gets the request, however late it is. Control: the test above."""

    async with world(tmp_path, hedge_requests="off") as here:
        await _measure_and_hold(here, script := SlowOnce())
        request_task = asyncio.create_task(here.post())
        await eventually(lambda: any(replica.running for replica in here.replicas))
        for _ in range(20):
            assert (await here.post()).status == 200
        assert not request_task.done()
        script.gate.set()
        name = (await request_task).headers["x-request-id"]
        assert sum(call.request_id == name for replica in here.replicas for call in replica.calls) == 1
        assert await _hedged(here) == {}
