"""Run the jobs of a push on standbys of the fleet. Starts of versions come first.

A standby that has computed for one tenant must not work for another, so it ends with its job, whatever the result.

On a cluster, a push gets its engine from a zygote that shares the control plane's run directory, if there is one. A
standby is forked for each job. None is parked, because no version starts here.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from controlplane.app.control_plane_services import ControlPlaneServices
from controlplane.clock import Clock
from controlplane.registry.feed_hub import FeedHub
from controlplane.scaling.local.adopter import Adopter
from controlplane.scaling.local.cpu_share import CpuShare
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.footprints import Footprints
from controlplane.scaling.local.local_actuator import LocalActuator
from controlplane.scaling.local.runtime_process import RuntimeProcess
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.replica_lifecycle import ReplicaEvent
from controlplane.scaling.replicas import ReplicaTable
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob, SealAttestation, SealJob
from kelvin.contracts.errors import OneMachineOnly, Refused
from kelvin.ipc.engine_jobs import JobRunner, PushJobs
from kelvin.ipc.zygote_client import ZYGOTE_SOCKET, ZygoteClient

STANDBY_WAIT_S: Final = 30.0
TERM_S: Final = 2.0
POLL_S: Final = 0.1
NO_ENGINE: Final = OneMachineOnly(
    "a push", "it needs a zygote beside the control plane, or `kelvin engine` beside the snapshotter: there is neither"
)


def build_job_runner(fleet: Fleet, pool: StandbyPool, feed: FeedHub) -> JobRunner:
    """Return a runner whose jobs run on standbys of the pool. Its calls raise Unavailable if none comes in time."""

    @asynccontextmanager
    async def standby() -> AsyncIterator[RuntimeProcess]:
        process = await pool.take(STANDBY_WAIT_S, "job")
        try:
            fleet.table.apply_event(process.runtime_id, ReplicaEvent.TOOK_JOB, fleet.clock.monotonic_us())
            pool.balance()
            yield process
        finally:
            fleet.end(process, TERM_S)

    return JobRunner(standby, feed.weight, feed.is_suspended)


class ZygotePushJobs:
    """Push jobs, while there is a zygote. `socket` is the zygote's. Waits for a zygote that is just starting."""

    def __init__(self, socket: Path, job_runner: PushJobs, clock: Clock) -> None:
        self._socket = socket
        self._job_runner = job_runner
        self._clock = clock

    def __repr__(self) -> str:
        return f"<ZygotePushJobs {self._job_runner!r}>"

    async def gate(self, job: GateJob) -> GateFacts:
        """Run a gate job. Raises as `JobRunner.gate`, and Refused(OneMachineOnly) without a zygote."""
        await self._wait_for_zygote()
        return await self._job_runner.gate(job)

    async def seal(self, job: SealJob) -> SealAttestation:
        """Run a seal job. Raises as `JobRunner.seal`, and Refused(OneMachineOnly) without a zygote."""
        await self._wait_for_zygote()
        return await self._job_runner.seal(job)

    async def _wait_for_zygote(self) -> None:
        limit_us = self._clock.monotonic_us() + int(STANDBY_WAIT_S * 1e6)
        while not self._socket.exists():
            if self._clock.monotonic_us() >= limit_us:
                raise Refused(NO_ENGINE)
            await self._clock.sleep(POLL_S)


async def build_zygote_push_jobs(stack: AsyncExitStack, services: ControlPlaneServices) -> ZygotePushJobs:
    """Build the push jobs and enter the installation's tasks. A loop ends standbys of an earlier control plane."""
    settings, clock, tasks = services.settings, services.clock, services.tasks
    zygote = ZygoteClient(services.directory)
    fleet = Fleet(services.directory, zygote, ReplicaTable(settings.device_slots), clock, tasks)
    stack.push_async_callback(fleet.close)
    await stack.enter_async_context(tasks)  # left before the fleet closes what the tasks use
    pool = StandbyPool(
        fleet, replace(settings.sizing, minimum=0), Footprints(fleet, lambda: zygote.pid), settings.cores
    )
    device = CpuShare(settings.cores, settings.threads_cap, settings.kv_bytes)
    actuator = LocalActuator(fleet, pool, services.feed, device, settings.drain_s, settings.term_s)
    adopter = Adopter(services.directory, fleet, pool, actuator, services.feed, lambda _: False)
    await adopter.sweep()
    tasks.start_loop("standbys", pool.run)
    tasks.start_loop("adopter", adopter.run)
    return ZygotePushJobs(services.directory.path / ZYGOTE_SOCKET, build_job_runner(fleet, pool, services.feed), clock)
