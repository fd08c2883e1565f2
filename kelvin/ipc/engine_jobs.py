"""Run a push's jobs on an engine: its gate and its seal. Each job uses up one standby process.

One gate and one seal run at a time, shared fairly by tenant and weight; a short gate waits for no seal. A job judges
untrusted input, so its time and memory are bounded. Its process also limits its own memory, because it may take
gigabytes between two checks here. A job ends when its caller disconnects or its tenant is suspended. The zygote's owner
passes in how to get a standby.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob, SealAttestation, SealJob
from kelvin.contracts.errors import Refused, TenantSuspended, Unavailable
from kelvin.ipc.forked_process import ForkedProcess
from kelvin.ipc.http_bodies import LARGE_BYTES, json_response, read_json
from kelvin.process.fair_lock import FairLock
from kelvin.process.procfs import private_bytes
from kelvin.process.race import run_until_disconnect

T = TypeVar("T")

MAX_WAITING: Final = 64
MAX_WAITING_OF_TENANT: Final = 8
GATE_S: Final = 60.0
SEAL_S: Final = 60.0  # plus the time for a draft's distinct chunks at SEAL_BYTES_S, from a slow store to an answer
SEAL_BYTES_S: Final = 20 << 20
MAX_JOB_S: Final = 900.0
GATE_BYTES: Final = 1 << 30  # limit on the process's growth
SEAL_BYTES: Final = 2 << 30  # limit on the process's growth, beside _COPIES of the draft
_COPIES: Final = 3  # copies of the draft's bytes that a seal may make
_UNKNOWN_DRAFT_BYTES: Final = 40 << 30  # assumed if an older snapshotter sends no size
_CHECK_INTERVAL_S: Final = 0.1
_DEATH_S: Final = 1.0  # until the kernel reports the end of a process whose connection broke
_ATTEMPTS: Final = 2
_RETRY_S: Final = 1.0  # parked processes may have been killed too: by then their deaths are known
_JUDGED: Final = "model"  # the artifact's name in errors that concern no single file


def seal_bytes(job: SealJob) -> int:
    """Return by how much the memory of a process that runs `job` may grow."""
    return SEAL_BYTES + _COPIES * _draft_bytes(job)


def _draft_bytes(job: SealJob) -> int:
    return job.total_bytes or _UNKNOWN_DRAFT_BYTES


StandbyFactory = Callable[[], AbstractAsyncContextManager[ForkedProcess]]


class PushJobs(Protocol):
    """Jobs that a push needs an engine for. Both methods raise Refused."""

    async def gate(self, job: GateJob) -> GateFacts: ...

    async def seal(self, job: SealJob) -> SealAttestation: ...


class JobRunner:
    """Runs jobs, one of each kind at a time. Cancelling a call ends its process. `standby` yields a parked process and
    ends it when the block ends.
    """

    def __init__(
        self,
        standby: StandbyFactory,
        weight_of: Callable[[str], int] = lambda _: 1,
        is_suspended: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._standby = standby
        self._weight_of = weight_of
        self._is_suspended = is_suspended
        self._gates = FairLock("the queue of gates", MAX_WAITING, MAX_WAITING_OF_TENANT)
        self._seals = FairLock("the queue of seals", MAX_WAITING, MAX_WAITING_OF_TENANT)

    def __repr__(self) -> str:
        return f"<JobRunner {self._gates!r} {self._seals!r}>"

    async def gate(self, job: GateJob) -> GateFacts:
        """Decide whether an architecture may be served. Raises Refused: the gate's reason, Overloaded, Unavailable."""
        return await self._run(
            self._gates, job.tenant, GATE_S, GATE_BYTES, lambda process: process.gate(job, MAX_JOB_S)
        )

    async def seal(self, job: SealJob) -> SealAttestation:
        """Record a draft's known answers. Raises Refused as `gate` does."""
        # A repeated chunk is sent once, so only distinct bytes extend the time limit.
        limit_s = min(SEAL_S + (job.distinct_bytes or _draft_bytes(job)) / SEAL_BYTES_S, MAX_JOB_S)
        return await self._run(
            self._seals, job.tenant, limit_s, seal_bytes(job), lambda process: process.seal(job, MAX_JOB_S)
        )

    async def _run(
        self,
        lock: FairLock,
        tenant: str,
        limit_s: float,
        limit_bytes: int,
        work: Callable[[ForkedProcess], Awaitable[T]],
    ) -> T:
        async with lock.hold(tenant, self._weight_of(tenant)):
            for attempt in range(_ATTEMPTS):
                if attempt:
                    await asyncio.sleep(_RETRY_S)
                if self._is_suspended(tenant):
                    raise Refused(TenantSuspended())
                async with self._standby() as process:
                    try:
                        return await self._bounded(process, tenant, limit_s, limit_bytes, work(process))
                    except Refused as refused:
                        # One process may have been killed from outside. If the second dies too, the job killed it.
                        if not isinstance(refused.failure, Unavailable) or not await process.wait_gone(_DEATH_S):
                            raise
        raise Refused(ArtifactRejected(_JUDGED, f"the process that judges it ended {_ATTEMPTS} times on the way"))

    async def _bounded(
        self, process: ForkedProcess, tenant: str, limit_s: float, limit_bytes: int, work: Awaitable[T]
    ) -> T:
        """Return the result of `work` on `process`. Kill the process on a bound, a suspension, or cancellation. Raises
        `Refused`.
        """
        loop = asyncio.get_running_loop()
        ends_s, before = loop.time() + limit_s, private_bytes(process.pid)
        working = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({working}, timeout=_CHECK_INTERVAL_S)
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
                process.signal(signal.SIGKILL)  # in native code it would not react to another signal
                working.cancel()
                await asyncio.wait({working})


def job_routes(jobs: PushJobs) -> list[Route]:
    """Return routes by which a snapshotter runs jobs at a control plane or engine. A job ends with its connection."""

    async def gate(request: Request) -> Response:
        job = await read_json(request, GateJob, LARGE_BYTES)
        return json_response(await run_until_disconnect(request.receive, jobs.gate(job)))

    async def seal(request: Request) -> Response:
        job = await read_json(request, SealJob)
        return json_response(await run_until_disconnect(request.receive, jobs.seal(job)))

    return [
        Route("/internal/v1/jobs/gate", gate, methods=["POST"]),
        Route("/internal/v1/jobs/seal", seal, methods=["POST"]),
    ]
