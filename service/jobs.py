"""Jobs that need the engine but serve nobody: the gate and the seal of a push. Each takes a standby and uses it up.

One gate and one seal run at a time: they are the platform's work, and a gate, which is short, waits for no seal.
Tenants take turns by their weights. What a job judges is a stranger's, so a job has a bound of time and of memory. It
ends when its caller leaves, or its tenant is suspended. Where standbys come from, and how they end, is said by
whoever has a zygote.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeVar

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Refused, TenantSuspended, Unavailable
from contracts.jobs import GateFacts, GateJob, SealAttestation, SealJob
from service.born import BornProcess
from service.fair_lock import FairLock
from service.processes import private_bytes

T = TypeVar("T")

MAX_WAITING: Final = 64
MAX_WAITING_OF_TENANT: Final = 8
GATE_S: Final = 60.0
SEAL_S: Final = 60.0  # and what a draft's bytes take, from a slow store to a replica's answer
SEAL_BYTES_S: Final = 20 << 20
LONGEST_S: Final = 900.0
GATE_BYTES: Final = 1 << 30  # what it may grow by
SEAL_BYTES: Final = 2 << 30  # beside the draft's own
_COPIES: Final = 3  # of a draft's bytes, which a seal may make
_UNSAID_BYTES: Final = 40 << 30  # of a draft whose size is not told: a snapshotter of an older build asks
_LOOK_S: Final = 0.1
_DEATH_S: Final = 1.0  # for the kernel to say that a process is gone whose connection was cut
_ATTEMPTS: Final = 2
_JUDGED: Final = "model"  # whose fault it is, where no file is known

Standby = Callable[[], AbstractAsyncContextManager[BornProcess]]


class Jobs(Protocol):
    """What a push needs an engine for. Both raise Refused."""

    async def gate(self, job: GateJob) -> GateFacts: ...

    async def seal(self, job: SealJob) -> SealAttestation: ...


class JobDesk:
    """Runs jobs on standbys, each kind one after another. `standby` gives one that is parked; left, it ends.

    Cancelling a call ends its process.
    """

    def __init__(
        self,
        standby: Standby,
        weight_of: Callable[[str], int] = lambda _: 1,
        is_suspended: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._standby = standby
        self._weight_of = weight_of
        self._is_suspended = is_suspended
        self._gates = FairLock("the queue of gates", MAX_WAITING, MAX_WAITING_OF_TENANT)
        self._seals = FairLock("the queue of seals", MAX_WAITING, MAX_WAITING_OF_TENANT)

    def __repr__(self) -> str:
        return f"<JobDesk {self._gates!r} {self._seals!r}>"

    async def gate(self, job: GateJob) -> GateFacts:
        """May this architecture be served? Raises Refused: the gate's reason, Overloaded, Unavailable."""
        return await self._run(
            self._gates, job.tenant, GATE_S, GATE_BYTES, lambda process: process.gate(job, LONGEST_S)
        )

    async def seal(self, job: SealJob) -> SealAttestation:
        """Record a draft's known answers. Raises Refused likewise."""
        size = job.total_bytes or _UNSAID_BYTES
        limit_s = min(SEAL_S + size / SEAL_BYTES_S, LONGEST_S)
        limit_bytes = SEAL_BYTES + _COPIES * size
        return await self._run(
            self._seals, job.tenant, limit_s, limit_bytes, lambda process: process.seal(job, LONGEST_S)
        )

    async def _run(
        self,
        lock: FairLock,
        tenant: str,
        limit_s: float,
        limit_bytes: int,
        work: Callable[[BornProcess], Awaitable[T]],
    ) -> T:
        async with lock.hold(tenant, self._weight_of(tenant)):
            for _ in range(_ATTEMPTS):
                async with self._standby() as process:
                    try:
                        return await self._bounded(process, tenant, limit_s, limit_bytes, work(process))
                    except Refused as refused:
                        # One that dies may have been killed by somebody else. One that dies again dies of its job.
                        if not isinstance(refused.failure, Unavailable) or not await process.gone(_DEATH_S):
                            raise
        raise Refused(ArtifactRejected(_JUDGED, f"the process that judges it ended {_ATTEMPTS} times on the way"))

    async def _bounded(
        self, process: BornProcess, tenant: str, limit_s: float, limit_bytes: int, work: Awaitable[T]
    ) -> T:
        """The result of `work`, which `process` does. Raises `Refused` also where it is beyond a bound, or its tenant
        is suspended. The process is killed in those cases.
        """
        loop = asyncio.get_running_loop()
        ends_s, before = loop.time() + limit_s, private_bytes(process.pid)
        working = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({working}, timeout=_LOOK_S)
                if done:
                    return working.result()
                if private_bytes(process.pid) - before > limit_bytes:
                    raise Refused(
                        ArtifactRejected(_JUDGED, f"judging it takes more than {limit_bytes} bytes of memory")
                    )
                if loop.time() >= ends_s:
                    raise Refused(ArtifactRejected(_JUDGED, f"judging it takes longer than {limit_s:.0f} s"))
                if self._is_suspended(tenant):
                    raise Refused(TenantSuspended())
        finally:
            if not working.done():
                process.signal(signal.SIGKILL)  # whatever it is in, it may not even notice another signal
                working.cancel()
                await asyncio.wait({working})
