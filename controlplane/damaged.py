"""Sends away replicas whose memory was found wrong: they have it mapped, and it can't be mended under them.

The cache agent names their processes. One that serves is drained: it takes nothing new, and is made up for. One that
sleeps, or is on its way, ends.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from contracts.errors import Refused
from controlplane.policy.replica_life import LIVE, ReplicaState
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.process import Process

log = logging.getLogger(__name__)

LOOK_S: Final = 10.0
_MAPPED: Final = LIVE | {ReplicaState.ASLEEP}


class DamageLoop:
    """`damaged` asks for the processes, by number; `drain` begins a drain."""

    def __init__(
        self, damaged: Callable[[], Awaitable[frozenset[int]]], fleet: Fleet, drain: Callable[[Process], None]
    ) -> None:
        self._damaged = damaged
        self._fleet = fleet
        self._drain = drain

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self._fleet.clock.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Once; a cache that does not answer is asked again."""
        if all(replica.state not in _MAPPED for replica in self._fleet.table):
            return
        try:
            pids = await self._damaged()
        except Refused:
            return
        for replica in self._fleet.table:
            if replica.pid not in pids or replica.state not in _MAPPED:
                continue
            seen = {"runtime_id": replica.runtime_id, "version": str(replica.key)}
            log.error("a replica has memory that was found wrong", extra=seen)
            if replica.state is ReplicaState.READY:
                self._drain(self._fleet[replica.runtime_id])
            else:
                self._fleet.end(self._fleet[replica.runtime_id])
