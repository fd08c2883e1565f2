"""A run directory with a fake zygote, and the actuator of one machine over both."""

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from controlplane.app.push_jobs import build_job_runner
from controlplane.clock import SystemClock
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.local.adopter import Adopter
from controlplane.scaling.local.cpu_share import CpuShare
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.footprints import Footprints
from controlplane.scaling.local.local_actuator import LocalActuator
from controlplane.scaling.local.runtime_process import RuntimeProcess
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.standby_sizing import PoolSizing
from controlplane.scaling.replicas import Replica, ReplicaTable
from controlplane.tasks import Tasks
from kelvin.contracts.artifacts.runtime_control import RuntimeReport
from kelvin.contracts.errors import Failure, Refused, Unavailable
from kelvin.ipc.engine_jobs import JobRunner
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.zygote_client import ZygoteClient
from tests.controlplane.fake_zygote import live
from tests.eventually import eventually, wait
from tests.forkserver import FORKS

ROOT = Path(__file__).parents[2]


class RunDirectory:
    """A run directory: its sockets, the files that fakes wait for, and the log of their calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def tell(self, name: str) -> None:
        """Create the file that a fake waits for."""
        (self.path / name).touch()

    def calls(self, what: str) -> list[tuple[str, int]]:
        """Return (runtime id, microseconds) of each call of that kind."""
        log = self.path / "calls.log"
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(runtime_id, int(at_us)) for kind, runtime_id, at_us in lines if kind == what]

    def sockets(self) -> set[str]:
        """Return the runtime ids that have a socket."""
        return {path.name[3:-5] for path in self.path.glob("rt-*.sock")}


@contextmanager
def fake_zygote(run: RunDirectory) -> Iterator[None]:
    """Run the fake zygote as a process. It listens when the block begins."""
    (run.path / "zygote.sock").unlink(missing_ok=True)
    process = FORKS.Process(target=live, args=(run.path,))
    process.start()
    assert process.pid is not None
    try:
        wait((run.path / "zygote.sock").exists, "the zygote listens")
        yield
    finally:
        process.terminate()
        process.join(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that it was forking when it was terminated
        process.close()  # it has ended


class RecordingListener:
    """A listener that records each event."""

    def __init__(self) -> None:
        self.became_ready: list[Replica] = []
        self.failures: list[tuple[VersionKey, Failure]] = []
        self.deaths: list[Replica] = []

    def on_replica_ready(self, replica: Replica) -> None:
        self.became_ready.append(replica)

    def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
        self.failures.append((key, failure))

    def on_replica_lost(self, replica: Replica) -> None:
        self.deaths.append(replica)


@dataclass
class LocalMachine:
    """A whole local actuator and its collaborators."""

    run: RunDirectory
    feed: FeedHub
    table: ReplicaTable
    fleet: Fleet
    pool: StandbyPool
    actuator: LocalActuator
    jobs: JobRunner
    adopter: Adopter
    listener: RecordingListener

    def apply(self, key: VersionKey, replicas: int) -> int:
        """Request replicas as the autoscaler does. Return the time of the request in monotonic microseconds."""
        requested_us = self.fleet.clock.monotonic_us()
        self.actuator.apply(key, replicas, requested_us)
        return requested_us

    async def wait_until_parked(self, count: int = 1) -> None:
        """Wait until `count` standbys are parked."""
        await eventually(lambda: self.pool.parked == count, f"{count} parked standbys")
        self.check_integrity()

    async def wait_until_ready(self, key: VersionKey, count: int = 1) -> None:
        """Wait until `count` replicas of the version serve."""
        await eventually(lambda: self.table.ready_count(key) == count, f"{count} ready replicas of {key}")
        self.check_integrity()

    def check_integrity(self) -> None:
        self.fleet.check_integrity()
        self.pool.check_integrity()


@asynccontextmanager
async def local(
    run: RunDirectory,
    *,
    slots: int = 4,
    standbys: int = 1,
    sizing: PoolSizing | None = None,
    cores: int = 2,
    drain_s: float = 20.0,
    term_s: float = 40.0,
    known: Callable[[VersionKey], bool] = lambda _: True,
) -> AsyncIterator[LocalMachine]:
    """Yield an actuator that has adopted the processes in the run directory. The processes outlive the block.

    At the end its integrity is checked, and every descriptor must be closed.
    """
    before = len(os.listdir("/proc/self/fd"))
    with closing(SocketDirectory(run.path)) as directory:
        feed, table, clock, listener = FeedHub(), ReplicaTable(slots), SystemClock(), RecordingListener()
        tasks = Tasks()
        zygote = ZygoteClient(directory)
        fleet = Fleet(directory, zygote, table, clock, tasks)
        # The pool has a fixed size unless the test passes a sizing.
        wish = sizing or PoolSizing(minimum=standbys, maximum=standbys, target=0.99, share=0.0, budget_bytes=1 << 40)
        pool = StandbyPool(fleet, wish, Footprints(fleet, lambda: zygote.pid), cores)
        actuator = LocalActuator(fleet, pool, feed, CpuShare(2, 1, 64 << 20), drain_s, term_s)
        actuator.add_listener(listener)
        try:
            async with tasks:
                adopter = Adopter(directory, fleet, pool, actuator, feed, known)
                await adopter.sweep()
                pool.balance()
                tasks.start(pool.run(), "standbys")
                it = LocalMachine(
                    run, feed, table, fleet, pool, actuator, build_job_runner(fleet, pool, feed), adopter, listener
                )
                yield it
                it.check_integrity()
        finally:
            await fleet.close()
    # A cancelled fork may still wait for the zygote's answer, and closes its descriptor.
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "the end of every descriptor")


def fail_next_reports(monkeypatch: pytest.MonkeyPatch, count: int) -> list[None]:
    """Make the next `count` replica reports fail. Return a list with one item for each report that is still to fail."""
    report, missing = RuntimeProcess.report, [None] * count

    async def missed(self: RuntimeProcess) -> RuntimeReport:
        if missing:
            missing.pop()
            raise Refused(Unavailable("the runtime"))
        return await report(self)

    monkeypatch.setattr(RuntimeProcess, "report", missed)
    return missing
