"""Sends away replicas whose memory was found wrong: they have it mapped, and it can't be mended under them.

The cache agent names their processes. One that serves, or drains already, is told so: it takes nothing new, what it
computes over that memory ends at once, and it is made up for. One that sleeps, or is on its way, ends.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from contracts.errors import Refused
from controlplane.policy.replica_life import SERVING, SLEEPING, ReplicaState
from controlplane.replicas import Replica
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.process import Process
from service.loops import isolated
from telemetry.policy.instruments import Page

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
_SPEAKING: Final = SERVING | {ReplicaState.DOZING, ReplicaState.DRAINING}
_SILENT: Final = SLEEPING | {ReplicaState.RESTORING}


class DamageLoop:
    """`damaged` asks for the processes, by number; `condemn` has one leave. Each is counted and told once."""

    def __init__(
        self,
        damaged: Callable[[], Awaitable[frozenset[int]]],
        fleet: Fleet,
        condemn: Callable[[Process], None],
        page: Page,
    ) -> None:
        self._damaged = damaged
        self._fleet = fleet
        self._condemn = condemn
        self._told: set[str] = set()
        self._counter = page.counter("kelvin_condemned_replicas_total", "Replicas whose memory was found wrong.", ())

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self._fleet.clock.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Once; a cache that does not answer is asked again."""
        if all(replica.state not in _SPEAKING | _SILENT for replica in self._fleet.table):
            return
        try:
            pids = await self._damaged()
        except Refused:
            return
        self._told = {runtime_id for runtime_id in self._told if runtime_id in self._fleet.table}
        for replica in tuple(self._fleet.table):
            if replica.pid not in pids or replica.runtime_id in self._told:
                continue
            with isolated(replica.runtime_id):
                if self._send_away(replica):
                    self._told.add(replica.runtime_id)
                    self._counter.add(())
                    seen = {"runtime_id": replica.runtime_id, "version": str(replica.key), "state": replica.state}
                    log.error("a replica has memory that was found wrong", extra=seen)

    def _send_away(self, replica: Replica) -> bool:
        process = self._fleet[replica.runtime_id]
        if replica.state in _SPEAKING:
            self._condemn(process)
        elif replica.state in _SILENT:
            self._fleet.end(process)
        else:
            return False
        return True
