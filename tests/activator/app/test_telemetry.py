"""Exporting traces costs callers nothing, even if the collector hangs or refuses."""

import asyncio
from pathlib import Path

import pytest

from tests.activator.world import world
from tests.kelvin.telemetry import receiver
from tests.kelvin.telemetry.receiver import Receiver

pytestmark = pytest.mark.deep


async def _until(collector: Receiver, request_id: str) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(collector.trace_of, request_id):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("mode", ["hang", "refuse"])
async def test_silent_trace_collector_fails_no_request(tmp_path: Path, mode: str) -> None:
    """Requests are served and the activator stops in time. A collector that accepts again receives traces again."""
    with receiver.running() as collector:
        async with world(tmp_path, otlp_endpoint=collector.endpoint, trace_share=1) as here:
            await here.replica("a")
            await asyncio.to_thread(collector.become, mode)
            for _ in range(40):
                assert (await here.post()).status == 200
            async with asyncio.timeout(60):
                while not (await asyncio.to_thread(collector.seen))["asked"]:
                    await asyncio.sleep(0.05)
            assert (await here.post()).status == 200
            assert await here.series("kelvin_traces_total")
            assert await here.metric_value("kelvin_traces_total", result="sent") == 0
            await here.wait_for_metric("kelvin_requests_total", 41, tenant="default", model="m", outcome="ok")
            if mode == "refuse":
                await asyncio.to_thread(collector.become, "take")
                got = await here.post()
                await _until(collector, got.headers["x-request-id"])
            assert await here.terminate() == 0


async def test_waiting_spans_are_exported_at_stop(tmp_path: Path) -> None:
    """A request right before the stop is exported. The replica gets the caller's trace id with our span as parent."""
    with receiver.running() as collector:
        async with world(tmp_path, otlp_endpoint=collector.endpoint, trace_share=1) as here:
            replica = await here.replica("a")
            got = await here.post(traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
            assert await here.terminate() == 0
            (whole, *stages) = await asyncio.to_thread(collector.trace_of, got.headers["x-request-id"])
            assert {span["name"] for span in stages} >= {"routed", "dispatched", "first_token", "done"}
            assert whole["parent_span_id"]
            (call,) = replica.calls
            assert call.headers["traceparent"].startswith(f"00-{'ab' * 16}-")
            assert "cd" * 8 not in call.headers["traceparent"]
