"""Watch the GPUs that a pod may use. An unhealthy one makes the pod drain."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kelvin.devices.gpu_policy import DegradedGpu, GpuFacts, GpuHealth, HealthyGpu, UnhealthyGpu, worst_gpu_health
from runtime.drivers.thread_bridge import run_in_thread

log = logging.getLogger(__name__)

GPU_POLL_S: Final = 5.0


class GpuWatch:
    """The poller of one process's GPUs. Its last facts may be read at any time."""

    def __init__(self, read_gpus: Callable[[], tuple[GpuFacts, ...]], interval_s: float = GPU_POLL_S) -> None:
        """`read_gpus` returns the facts of all devices. It blocks, and the constructor calls it once."""
        self._read_gpus = read_gpus
        self._interval_s = interval_s
        self.last_facts: tuple[GpuFacts, ...] = ()
        self.health: GpuHealth = HealthyGpu()
        self._update(read_gpus())

    def __repr__(self) -> str:
        return f"<GpuWatch devices={len(self.last_facts)} {self.health}>"

    async def run(self, on_unhealthy: Callable[[], None]) -> None:
        """Poll until cancelled. Call `on_unhealthy` once, and keep polling for the metrics afterwards."""
        notified = False
        while True:
            if isinstance(self.health, UnhealthyGpu) and not notified:
                notified = True
                on_unhealthy()
            await asyncio.sleep(self._interval_s)
            self._update(await run_in_thread("gpus", self._read_gpus))

    def _update(self, last_facts: tuple[GpuFacts, ...]) -> None:
        previous, self.last_facts = self.health, last_facts
        if isinstance(previous, UnhealthyGpu):
            return  # unhealthy is final: this process never trusts the GPU again
        self.health = worst_gpu_health(last_facts)
        if self.health == previous:
            return
        match self.health:
            case UnhealthyGpu(reason):
                log.error("a GPU is unhealthy", extra={"why": reason})
            case DegradedGpu(reason):
                log.warning("a GPU is degraded", extra={"why": reason})
            case HealthyGpu():
                log.info("the GPUs are healthy again")
