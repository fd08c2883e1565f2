"""Jobs that need the engine but serve nobody: the gate and the seal of a push. Each takes a standby and uses it up.

One runs at a time: they are the platform's work. Where standbys come from, and how they end, is said by whoever has a
zygote.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

from contracts.errors import Refused
from contracts.jobs import GateFacts, GateJob, SealAttestation, SealJob
from contracts.traffic_errors import Overloaded
from service.born import BornProcess

MAX_WAITING: Final = 16
GATE_S: Final = 120.0
SEAL_S: Final = 900.0

Standby = Callable[[], AbstractAsyncContextManager[BornProcess]]


class Jobs(Protocol):
    """What a push needs an engine for. Both raise Refused."""

    async def gate(self, job: GateJob) -> GateFacts: ...

    async def seal(self, job: SealJob) -> SealAttestation: ...


class JobDesk:
    """Runs jobs on standbys, one after another. `standby` gives one that is parked; left, it ends."""

    def __init__(self, standby: Standby) -> None:
        self._standby = standby
        self._turn = asyncio.Lock()
        self._present = 0

    def __repr__(self) -> str:
        return f"<JobDesk present={self._present}/{MAX_WAITING}>"

    async def gate(self, job: GateJob) -> GateFacts:
        """May this architecture be served? Raises Refused: the gate's reason, Overloaded, Unavailable."""
        async with self._taken() as process:
            return await process.gate(job, GATE_S)

    async def seal(self, job: SealJob) -> SealAttestation:
        """Record a draft's known answers. Raises Refused likewise."""
        async with self._taken() as process:
            return await process.seal(job, SEAL_S)

    @asynccontextmanager
    async def _taken(self) -> AsyncIterator[BornProcess]:
        if self._present >= MAX_WAITING:
            raise Refused(Overloaded("the queue of jobs", MAX_WAITING, 1.0))
        self._present += 1
        try:
            async with self._turn, self._standby() as process:
                yield process
        finally:
            self._present -= 1
