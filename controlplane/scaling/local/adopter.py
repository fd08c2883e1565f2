"""Adopt processes without an owner: those of an earlier control plane, and forks whose answer came too late.

Runtimes serve on while there is no control plane, so nothing is restarted. The owner of each socket reports its state
and version. A socket without a listener is removed. A silent process is asked again at the next sweep, because it may
be computing a long prompt on a loaded core. If it hangs, the supervisor's watchdog kills it.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

from controlplane import dependencies
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.local.drain import POLL_S
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.local_actuator import RESTORE_S, LocalActuator
from controlplane.scaling.local.runtime_process import RuntimeProcess
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.replicas import Replica, replica_row
from kelvin.contracts.artifacts.runtime_control import RuntimeReport, RuntimeState
from kelvin.contracts.errors import Conflict, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Feed
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory, peer_pid
from kelvin.process.loops import contain_errors

log = logging.getLogger(__name__)

PROBE_S: Final = dependencies.ADOPTION.timeout_s
SWEEP_S: Final = 30.0
SILENT_RETRY_S: Final = 1.0  # while some process is silent
_STATES: Final = {
    RuntimeState.STANDBY: ReplicaState.STANDBY,
    RuntimeState.RESTORING: ReplicaState.RESTORING,
    RuntimeState.READY: ReplicaState.READY,
    RuntimeState.ASLEEP: ReplicaState.ASLEEP,
    RuntimeState.DEEP_SLEEP: ReplicaState.DEEP_SLEEP,
    RuntimeState.DRAINING: ReplicaState.DRAINING,
    RuntimeState.FAILED: ReplicaState.ENDING,
}
VersionExists = Callable[[VersionKey], bool]


@dataclass(frozen=True, slots=True)
class ProbedRuntime:
    """A live process and its report. The caller must close `pidfd`."""

    report: RuntimeReport
    pidfd: int


async def probe_runtimes(
    directory: SocketDirectory, skip: Callable[[str], bool] = lambda _: False
) -> list[ProbedRuntime]:
    """Ask every runtime socket at once, except those whose ids `skip` accepts. Return the processes that answered.

    A socket without a listener is removed. A process that is silent, or can't be connected to for another reason, is
    left for the next call. A process that gives a wrong answer is killed.
    """
    found = await asyncio.gather(*(_probe(directory, name) for name in _sockets(directory, skip)))
    return [each for each in found if each is not None]


def _sockets(directory: SocketDirectory, skip: Callable[[str], bool]) -> list[str]:
    there = [path.name for path in directory.path.glob("rt-*.sock") if not path.is_dir()]
    return sorted(name for name in there if not skip(name[3:-5]))


async def _probe(directory: SocketDirectory, name: str) -> ProbedRuntime | None:
    try:
        pid = _listener_pid(directory, name)
        pidfd = os.pidfd_open(pid)
    except (ConnectionRefusedError, FileNotFoundError, ProcessLookupError):
        _remove(directory, name)  # there is no listener
        return None
    except OSError as error:
        # The process may live: its backlog is full, or this process has no descriptors left. The next sweep asks again.
        log.error("a runtime can't be asked", extra={"socket": name, "why": repr(error)})
        return None
    client = ServiceClient(directory, name, "the runtime")
    try:
        # Ask after the pidfd was opened. A process that answers now was alive then, so its pid was not reused.
        report = await client.call("GET", "/control/state", RuntimeReport, timeout_s=PROBE_S)
        if report.pid != pid or f"rt-{report.runtime_id}.sock" != name:
            raise Refused(Conflict(name, f"is answered for {report.runtime_id}, process {report.pid}"))
    except Refused as refused:
        if isinstance(refused.failure, Unavailable):
            log.warning("a runtime is silent; it is asked again", extra={"socket": name, "pid": pid})
            os.close(pidfd)
            return None
        log.error("a runtime gave a wrong answer; killing it", extra={"socket": name, "pid": pid, "why": str(refused)})
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        _remove(directory, name)
        return None
    except BaseException:
        os.close(pidfd)
        raise
    finally:
        await client.close()
    return ProbedRuntime(report, pidfd)


def _remove(directory: SocketDirectory, name: str) -> None:
    """Remove a socket. On a read-only disk, leave it: the next sweep finds it again."""
    with suppress(OSError):
        (directory.path / name).unlink()


def _listener_pid(directory: SocketDirectory, name: str) -> int:
    """Return the pid of the process that listens at the socket, as the kernel reports it.

    Does not block: a stopped process keeps a full backlog. Raises OSError if nothing listens or the backlog is full.
    """
    with closing(directory.connect(name, timeout_s=dependencies.CONNECT_S)) as sock:
        return peer_pid(sock)


@dataclass(frozen=True, slots=True)
class Adopter:
    """Adopts processes at start-up, and later those that were lost between zygote and fleet."""

    directory: SocketDirectory
    fleet: Fleet
    pool: StandbyPool
    actuator: LocalActuator
    feed: FeedHub
    version_exists: VersionExists

    async def sweep(self) -> int:
        """Adopt the processes that the fleet does not know, and return their number. A silent one counts as a taken
        slot until it is known.
        """
        found = await probe_runtimes(self.directory, self.fleet.is_known)
        for each in found:
            with contain_errors(each.report.runtime_id):
                self._adopt(each)
        self.fleet.table.unknown_processes = len(_sockets(self.directory, self.fleet.is_known))
        return len(found)

    async def run(self) -> None:
        """Sweep periodically until cancelled."""
        while True:
            await self.fleet.clock.sleep(SILENT_RETRY_S if self.fleet.table.unknown_processes else SWEEP_S)
            await self.sweep()

    def _adopt(self, found: ProbedRuntime) -> None:
        """Adopt a process in its present state. If its version does not exist, drain or end it."""
        replica = _replica(found.report, self.fleet.clock.monotonic_us())
        process = self.fleet.adopt(replica, found.pidfd)
        log.info("adopted", extra={"runtime_id": replica.runtime_id, "state": replica.state})
        is_known = replica.key is not None and self.version_exists(replica.key)
        match replica.state:
            case ReplicaState.STANDBY:
                self.pool.adopt(process)
            case ReplicaState.RESTORING if is_known:
                self.fleet.tasks.start(self._watch_restore(process), f"watch {process.runtime_id}")
            case ReplicaState.READY if is_known:
                self.feed.publish(Feed(replicas=(replica_row(replica),)))
                self.actuator.notify_ready(replica)
            case ReplicaState.READY | ReplicaState.DRAINING:
                self.actuator.drain(process)
            case ReplicaState.ASLEEP | ReplicaState.DEEP_SLEEP if is_known:
                pass  # it sleeps on until the autoscaler decides otherwise
            case ReplicaState.ENDING:
                self.fleet.tasks.start(process.end(), f"end {process.runtime_id}")
            case _:
                self.fleet.end(process)

    async def _watch_restore(self, process: RuntimeProcess) -> None:
        """Watch a restore that an earlier control plane began: poll until the runtime is ready, dead or too late."""
        fleet = self.fleet
        key = fleet.table[process.runtime_id].key
        limit_us = fleet.clock.monotonic_us() + int(RESTORE_S * 1e6)
        while not process.is_leaving:
            with suppress(Refused):  # it may not answer for a while
                report = await process.report()
                if report.state is RuntimeState.READY:
                    self.actuator.mark_ready(process, report.max_streams, report.spans, url=report.url)
                    return
                if report.state is not RuntimeState.RESTORING:
                    break
            if fleet.clock.monotonic_us() > limit_us:
                break
            await fleet.clock.sleep(POLL_S)
        if not process.is_ending:
            fleet.end(process)
            if key is not None:
                self.actuator.fail_start(key, Unavailable("the runtime"))


def _replica(report: RuntimeReport, now_us: int) -> Replica:
    key = None
    if report.tenant is not None and report.model is not None and report.version is not None:
        key = VersionKey(report.tenant, report.model, report.version)
    state = _STATES[report.state]
    if key is None and state is not ReplicaState.STANDBY:
        state = ReplicaState.ENDING  # it is busy, but names no version
    if key is not None and state is ReplicaState.STANDBY:
        state = ReplicaState.ENDING
    return Replica(
        report.runtime_id,
        state,
        now_us,
        report.pid,
        key,
        report.device_class or "",
        report.max_streams,
        report.spans,
        url=report.url,
    )
