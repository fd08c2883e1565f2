"""A pod whose GPU becomes unhealthy drains and reports the reason."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from kelvin.contracts.artifacts.runtime_control import RuntimeState
from kelvin.devices.gpu_policy import CudaVisibility, DegradedGpu, GpuFacts, HealthyGpu, UnhealthyGpu
from runtime.api.control_api import build_probe_app
from runtime.app import pod
from runtime.lifecycle.gpu_watch import GpuWatch
from tests.runtime.fakes import DEADLINE_S, ReplicaServer, script_of, serve_replica
from tests.runtime.scripted_engine import ScriptedEngine

GOOD = GpuFacts("GPU 0", temperature_c=50, memory_used_bytes=3, memory_total_bytes=7)
LOST = GpuFacts("GPU 0", lost=True)


class Scripted:
    """One GPU with these facts."""

    def __init__(self, facts: GpuFacts) -> None:
        self.facts = facts

    def look(self) -> tuple[GpuFacts, ...]:
        return (self.facts,)


@pytest.mark.parametrize(
    ("then", "ready"), [pytest.param(LOST, 503, id="lost"), pytest.param(GOOD, 200, id="the control: as before")]
)
async def test_an_unhealthy_device_drains_its_pod(tmp_path: Path, then: GpuFacts, ready: int) -> None:
    """The pod is not ready, completes its running answer, and its metrics show the GPU's state."""
    gpu, engine = Scripted(GOOD), ScriptedEngine(script_of("hello"), paced=True)
    watch = GpuWatch(gpu.look, interval_s=0.01)

    async def asked(each: ReplicaServer, path: str) -> tuple[int, str]:
        async with each.session.get(f"http://rt{path}") as answer:
            return answer.status, await answer.text()

    async with serve_replica(tmp_path, engine, probes=build_probe_app(3600.0, watch)) as each:
        watching = asyncio.create_task(watch.run(each.replica.drain))
        try:
            answering = asyncio.create_task(each.frames())
            await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
            assert (await asked(each, "/readyz"))[0] == 200
            gpu.facts = then
            looks = GOOD if ready == 200 else LOST
            await each.until("it looked", lambda: watch.last_facts == (looks,))
            await each.until("it is told", lambda: (each.replica.state is RuntimeState.DRAINING) is (ready == 503))
            assert (await asked(each, "/readyz"))[0] == ready
            state = "healthy" if ready == 200 else "unhealthy"
            page = (await asked(each, "/metrics"))[1]
            assert f'kelvin_gpu_health{{process="runtime",gpu="GPU 0",state="{state}"}} 1' in page
            assert ("kelvin_gpu_temperature_celsius{" in page) is (ready == 200)
            engine.run_freely()
            assert len(await answering) > 1
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def test_unhealthy_gpu_is_not_trusted_again() -> None:
    """A GPU that was unhealthy stays so for this process. A degraded one may recover."""
    gpu = Scripted(GpuFacts("GPU 0", xids=(94,)))
    watch = GpuWatch(gpu.look)
    found = [watch.health]
    for facts in (GOOD, LOST, GOOD):
        gpu.facts = facts
        watch._update(gpu.look())
        found.append(watch.health)
    lost = UnhealthyGpu("GPU 0: it does not answer")
    assert found == [DegradedGpu("GPU 0: XID 94"), HealthyGpu(), lost, lost]


def test_pod_watches_the_gpus_that_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod with a CPU class watches no GPU."""
    looked: list[CudaVisibility] = []

    def opened(*, shown: CudaVisibility) -> AbstractContextManager[None]:
        looked.append(shown)
        return nullcontext()

    monkeypatch.setattr(pod, "open_gpus", opened)
    for device_class in ("h100", "cpu-1"):
        with pod.open_gpus_for(device_class, CudaVisibility("1")):
            pass
    assert looked == [CudaVisibility("1")]
