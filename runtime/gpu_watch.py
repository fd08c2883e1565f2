"""Looks after the GPUs that a pod may see: one on which nothing is to be left ends the pod's serving, in order."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from contracts.gpu import Degraded, GpuFacts, GpuHealth, Healthy, Unhealthy, worst
from runtime.threads import run_in_thread

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0


class GpuWatch:
    """Of one process. What it saw last may be read at any time."""

    def __init__(self, look: Callable[[], tuple[GpuFacts, ...]], every_s: float = LOOK_S) -> None:
        """`look` says how every device is. Blocking, and called once at once."""
        self._look = look
        self._every_s = every_s
        self.seen: tuple[GpuFacts, ...] = ()
        self.health: GpuHealth = Healthy()
        self._take(look())

    def __repr__(self) -> str:
        return f"<GpuWatch devices={len(self.seen)} {self.health}>"

    async def run(self, on_unhealthy: Callable[[], None]) -> None:
        """Again and again; `on_unhealthy` once, and it looks on for those who ask. Ends by being cancelled."""
        told = False
        while True:
            if isinstance(self.health, Unhealthy) and not told:
                told = True
                on_unhealthy()
            await asyncio.sleep(self._every_s)
            self._take(await run_in_thread("gpus", self._look))

    def _take(self, seen: tuple[GpuFacts, ...]) -> None:
        before, self.seen = self.health, seen
        if isinstance(before, Unhealthy):
            return  # what was once is not trusted again by this process
        self.health = worst(seen)
        if self.health == before:
            return
        match self.health:
            case Unhealthy(reason):
                log.error("a GPU is unhealthy", extra={"why": reason})
            case Degraded(reason):
                log.warning("a GPU is degraded", extra={"why": reason})
            case Healthy():
                log.info("the GPUs are healthy again")
