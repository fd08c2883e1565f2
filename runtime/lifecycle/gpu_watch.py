"""Looks after the GPUs that a pod may see: one on which nothing is to be left ends the pod's serving, in order."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kelvin.devices.gpu_policy import DegradedGpu, GpuFacts, GpuHealth, HealthyGpu, UnhealthyGpu, worst_gpu_health
from runtime.drivers.thread_bridge import run_in_thread

log = logging.getLogger(__name__)

GPU_POLL_S: Final = 5.0


class GpuWatch:
    """Of one process. What it saw last may be read at any time."""

    def __init__(self, look: Callable[[], tuple[GpuFacts, ...]], every_s: float = GPU_POLL_S) -> None:
        """`look` says how every device is. Blocking, and called once at once."""
        self._read_gpus = look
        self._every_s = every_s
        self.last_facts: tuple[GpuFacts, ...] = ()
        self.health: GpuHealth = HealthyGpu()
        self._update(look())

    def __repr__(self) -> str:
        return f"<GpuWatch devices={len(self.last_facts)} {self.health}>"

    async def run(self, on_unhealthy: Callable[[], None]) -> None:
        """Again and again; `on_unhealthy` once, and it looks on for those who ask. Ends by being cancelled."""
        told = False
        while True:
            if isinstance(self.health, UnhealthyGpu) and not told:
                told = True
                on_unhealthy()
            await asyncio.sleep(self._every_s)
            self._update(await run_in_thread("gpus", self._read_gpus))

    def _update(self, last_facts: tuple[GpuFacts, ...]) -> None:
        before, self.last_facts = self.health, last_facts
        if isinstance(before, UnhealthyGpu):
            return  # what was once is not trusted again by this process
        self.health = worst_gpu_health(last_facts)
        if self.health == before:
            return
        match self.health:
            case UnhealthyGpu(reason):
                log.error("a GPU is unhealthy", extra={"why": reason})
            case DegradedGpu(reason):
                log.warning("a GPU is degraded", extra={"why": reason})
            case HealthyGpu():
                log.info("the GPUs are healthy again")
