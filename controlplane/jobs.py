"""Jobs that need the engine but serve nobody: the gate and the seal of a push. Each takes a standby and uses it up.

A process that has computed for one tenant takes nothing of another, so a job's standby ends with it, whatever came of
the job. One job runs at a time: they are the platform's work, and starts come first.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from contracts.errors import Refused
from contracts.jobs import GateFacts, GateJob, SealAttestation, SealJob
from contracts.traffic_errors import Overloaded
from controlplane.policy.replica_life import ReplicaEvent
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.pool import StandbyPool
from controlplane.scaling.process import Process

log = logging.getLogger(__name__)

MAX_WAITING: Final = 16
STANDBY_S: Final = 30.0
GATE_S: Final = 120.0
SEAL_S: Final = 900.0
TERM_S: Final = 2.0


class JobDesk:
    """Runs jobs on standbys, one after another."""

    def __init__(self, fleet: Fleet, pool: StandbyPool) -> None:
        self._fleet = fleet
        self._pool = pool
        self._turn = asyncio.Lock()
        self._present = 0

    def __repr__(self) -> str:
        return f"<JobDesk present={self._present}/{MAX_WAITING}>"

    async def gate(self, job: GateJob) -> GateFacts:
        """May this architecture be served? Raises Refused: the gate's reason, Overloaded, Unavailable."""
        async with self._standby() as process:
            return await process.gate(job, GATE_S)

    async def seal(self, job: SealJob) -> SealAttestation:
        """Record a draft's known answers. Raises Refused likewise."""
        async with self._standby() as process:
            return await process.seal(job, SEAL_S)

    @asynccontextmanager
    async def _standby(self) -> AsyncIterator[Process]:
        if self._present >= MAX_WAITING:
            raise Refused(Overloaded("the queue of jobs", MAX_WAITING, 1.0))
        self._present += 1
        try:
            async with self._turn:
                process = await self._pool.take(STANDBY_S, "job")
                try:
                    self._fleet.table.move(process.runtime_id, ReplicaEvent.TOOK_JOB, self._fleet.clock.monotonic_us())
                    self._pool.balance()
                    yield process
                finally:
                    self._fleet.end(process, TERM_S)
        finally:
            self._present -= 1
