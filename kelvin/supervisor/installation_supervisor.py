"""Supervisor of `kelvin up`: start the processes, report readiness, restart dead processes, drain in order."""

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kelvin.contracts.deadline import Deadline
from kelvin.ipc.forked_process import socket_name
from kelvin.ipc.peer_settings import WILDCARD_HOSTS, listener_url
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.tcp_listener import LISTENER_VARIABLE, listen
from kelvin.process.exit_log import REPLICAS, ExitLog
from kelvin.process.log import configure_logging
from kelvin.process.loops import Loops
from kelvin.process.race import first_completed
from kelvin.process.service_lifecycle import stop_on_signals
from kelvin.process.settings import log_level
from kelvin.spool.shipper import Shipper
from kelvin.supervisor.child_group import (
    KILL_AFTER_S,
    POLL_S,
    Child,
    ChildGroup,
    ReapedChild,
    become_subreaper,
    call_on_deaths,
    children,
    open_lifeline,
    specs_of,
)
from kelvin.supervisor.data_lock import data_lock, name_path_in_errors
from kelvin.supervisor.exit_recorder import ExitRecorder, open_exit_recorder
from kelvin.supervisor.hot_restart import HotRestart
from kelvin.supervisor.ledger_client import LedgerClient
from kelvin.supervisor.log_rotation import last_lines, rotate_forever
from kelvin.supervisor.restart_policy import START_S
from kelvin.supervisor.settings import UpSettings, child_environment
from kelvin.supervisor.watchdog import Watchdog, WatchedProcess, is_ready, listener_pid, make_socket_probe

log = logging.getLogger(__name__)

MAX_START_DEATHS: Final = 4  # before the first readiness
WAIT_LOG_S: Final = 5.0  # between two log lines while the start waits
ROOM_BYTES: Final = 1 << 20  # with less free space on the disk of DATA, a process may die before it can log why


class NotReady(Exception):
    """A process did not become ready in time. The text names it and shows the end of its log."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The content of the ready line."""

    url: str
    ca: Path
    key: Path
    admin_key: Path

    def __str__(self) -> str:
        return f"kelvin is ready: url={self.url} ca={self.ca} key={self.key} admin-key={self.admin_key}"


class Supervisor:
    """Owns every process of one data directory. No request passes through it."""

    def __init__(
        self,
        settings: UpSettings,
        directory: SocketDirectory,
        exit_recorder: ExitRecorder,
        lifeline_fd: int,
        listener: socket.socket | None,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._exit_recorder = exit_recorder
        self._lifeline_fd = lifeline_fd
        self._listener = listener  # kept open during a hot restart: connections wait instead of being refused
        self._environments = {uses: child_environment(settings, lifeline_fd, uses_store=uses) for uses in (False, True)}
        members = [Child(spec) for spec in specs_of(filters=settings.filters)]
        self.group = ChildGroup(members, self._spawn, self._on_death)
        self._notes = ExitLog(settings.data / "run")
        self._killed: dict[int, tuple[str, str]] = {}  # pid of a hung process: its name, and why it is killed
        self._hot_restart = HotRestart(
            self.group,
            self._may_hot_restart,
            self._is_serving,
            settings.data / "run",
            settings.ready_s,
            settings.drain_s,
        )

    def __repr__(self) -> str:
        return f"<Supervisor {self.group}>"

    def _spawn(self, child: Child) -> None:
        environment, fds = self._environments[child.spec.uses_store], [self._lifeline_fd]
        if child.spec.listens and self._listener is not None:
            fds.append(self._listener.fileno())
            environment = {**environment, LISTENER_VARIABLE: str(fds[-1])}
        child.start(self._settings.data / "logs", environment, *fds)

    def watched(self) -> list[WatchedProcess]:
        """Return every process that should answer probes: children, and replicas and standbys forked by the zygote."""
        if self.group.is_draining:
            return []
        alive = set(children())
        # A replica with a version has already answered on its socket: that is how it got its version.
        lives = (
            (pid, name, has_version)
            for pid, name, has_version in self._exit_recorder.metered_processes()
            if pid in alive
        )
        replicas = [WatchedProcess(name, pid, socket_name(name), has_version) for pid, name, has_version in lives]
        return self.group.watched() + replicas

    def on_hung(self, hung: WatchedProcess, why: str) -> None:
        """Remember why a process is being killed. The exit log gets it once the process has ended."""
        self._killed[hung.pid] = hung.name, why

    def _on_death(self, reaped: ReapedChild, child: Child | None) -> None:
        """Record the lifetime of a replica. Write unexpected exits to the exit log."""
        name, why = self._killed.pop(reaped.pid, ("", None))
        if child is None:
            self._exit_recorder.record_exit(reaped)
            if why is not None:
                self._record_exit(REPLICAS, reaped.status, f"{name}: {why}")
        elif child.is_restarted and not self.group.is_draining:
            self._record_exit(child.spec.name, reaped.status, why)

    def _record_exit(self, name: str, status: int, why: str | None) -> None:
        try:
            self._notes.add(name, status, int(time.time()), why)
        except OSError as error:
            log.warning("how a process ended can't be noted", extra={"child": name, "error": repr(error)})

    def restart_activator(self) -> None:
        """Replace the activator's process without a failed request."""
        if not self.group.is_draining:
            self._hot_restart.begin()

    async def _may_hot_restart(self) -> bool:
        return self._listener is not None and await is_ready(self._directory, "controlplane", "control.sock")

    async def _is_serving(self, child: Child) -> bool:
        """Return whether this process, not another one, answers on its socket and is ready."""
        name = child.spec.socket
        assert name is not None
        if child.pid is None or listener_pid(self._directory, name) != child.pid:
            return False
        return await is_ready(self._directory, child.spec.name, name)

    async def wait_ready(self) -> None:
        """Wait until every process is ready. Raises NotReady, or OSError if the start failed and the disk is full."""
        waiting = [child.spec for child in self.group.members]
        limit = time.monotonic() + self._settings.ready_s
        logged_at_s = time.monotonic()
        while waiting:
            spec = waiting[0]
            if time.monotonic() - logged_at_s > WAIT_LOG_S:
                log.info("not ready yet", extra={"waiting_for": spec.name})
                logged_at_s = time.monotonic()
            if await is_ready(self._directory, spec.name, spec.socket):
                waiting.pop(0)
            elif (refused := self._refused()) is not None:
                self._check_disk_space(refused)
                raise NotReady(f"{refused} can't start: {self._log_tail(refused, lines=1)}")
            elif (dead := self._keeps_dying()) is not None:
                self._check_disk_space(dead)
                raise NotReady(f"{dead} dies at once, again and again\n{self._log_tail(dead)}")
            elif time.monotonic() > limit:
                self._check_disk_space(spec.name)
                raise NotReady(
                    f"{spec.name} is not ready after {self._settings.ready_s} s; KELVIN_READY_S gives it longer\n"
                    f"{self._log_tail(spec.name)}"
                )
            else:
                await asyncio.sleep(POLL_S)

    def _refused(self) -> str | None:
        """Return a process that refused its settings. Restarting it would end the same way."""
        return next((child.spec.name for child in self.group.members if child.refused), None)

    def _keeps_dying(self) -> str | None:
        """Return a process that died MAX_START_DEATHS times in a row before becoming ready."""
        return next(
            (child.spec.name for child in self.group.members if child.restarts.deaths >= MAX_START_DEATHS), None
        )

    def _check_disk_space(self, name: str) -> None:
        """Raise OSError with the log's path if the disk is full. The log may then lack the reason of a death."""
        path = self._log_path(name)
        try:
            with tempfile.TemporaryFile(dir=path.parent) as file:
                os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.filename = str(path)
                raise

    def _log_path(self, name: str) -> Path:
        return self._settings.data / "logs" / f"{name}.log"

    def _log_tail(self, name: str, lines: int = 15) -> str:
        path = self._log_path(name)
        return "\n".join(last_lines(path, lines)) if path.exists() else ""

    async def drain(self, shipper: Shipper) -> None:
        """End the activator, replicas, and services that they use. The control plane is last: it records all deaths."""
        group, drain_s = self.group, self._settings.drain_s
        group.stop_restarts()
        self._hot_restart.cancel()
        if self._listener is not None:
            self._listener.close()  # together with the activator's own, so that callers are refused from then on
        by_name = {child.spec.name: child for child in group.members}
        await group.end([child for child in group.members if child.spec.listens], drain_s)
        await group.end([by_name["zygote"]], KILL_AFTER_S)
        await group.end_descendants(drain_s, spared=group.members)  # the replicas
        await self._exit_recorder.wait_recorded(KILL_AFTER_S)
        if not await shipper.flush(Deadline.after(KILL_AFTER_S, time.monotonic())):
            log.warning("lifetimes wait in the spool for the next start", extra={"records": shipper.backlog})
        backends = [by_name[name] for name in ("snapshotter", "cache", "filters") if name in by_name]
        await group.end(backends, KILL_AFTER_S)
        await group.end([by_name["controlplane"]], KILL_AFTER_S)


async def supervise(settings: UpSettings) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP. Raises NotReady."""
    with (
        closing(SocketDirectory(settings.data / "run")) as directory,
        open_exit_recorder(settings.data) as (exit_recorder, spool),
        open_lifeline() as lifeline_fd,
    ):
        control = ServiceClient(directory, "control.sock", "control plane")
        ledger_client = LedgerClient(control, settings.data / "spool")
        shipper = Shipper(spool, ledger_client.post_lifetimes)
        listener = _try_listen(settings)
        supervisor = Supervisor(settings, directory, exit_recorder, lifeline_fd, listener)
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        stop_on_signals(loop, stop.set)
        call_on_deaths(supervisor.group.reap_dead)
        loop.add_signal_handler(signal.SIGUSR1, supervisor.restart_activator)
        try:
            async with Loops() as loops:
                loops.start("shipper", shipper.run)
                loops.start("ledger recovery", ledger_client.recover_forever)
                loops.start("log rotation", lambda: rotate_forever(settings.data / "logs"))
                start_s = max(START_S, settings.ready_s)  # a longer KELVIN_READY_S also extends each process's start
                watchdog = Watchdog(supervisor.watched, make_socket_probe(directory), supervisor.on_hung, start_s)
                loops.start("watchdog", watchdog.run)
                try:
                    supervisor.group.start_all()
                    await first_completed(stop.wait(), supervisor.wait_ready())
                    if not stop.is_set():
                        print(_ready(settings), flush=True)
                        await stop.wait()
                finally:
                    await supervisor.drain(shipper)
        finally:
            await control.close()
            if listener is not None:
                listener.close()


def _try_listen(settings: UpSettings) -> socket.socket | None:
    """Return the listening socket, or None if the address is refused. The activator then reports the reason."""
    try:
        return listen(settings.host, settings.port)
    except OSError:
        return None


def _ready(settings: UpSettings) -> Ready:
    data, url = settings.data, activator_url(settings.host, settings.port)
    with name_path_in_errors(data / "url"):
        (data / "url").write_text(url + "\n")
    return Ready(url, data / "ca.pem", data / "default.key", data / "admin.key")


def activator_url(host: str, port: int) -> str:
    """Return the front door's URL for commands on this machine: localhost, or its only address."""
    with suppress(ValueError):  # a host name
        host = str(ipaddress.ip_address(host))  # canonical form: `::0` becomes `::`
    return listener_url("localhost" if host in (*WILDCARD_HOSTS, "127.0.0.1", "::1") else host, port)


def run_up(settings: UpSettings) -> None:
    """Run `kelvin up` until it is stopped. Raises AlreadyRunning, InsecureDirectory or NotReady."""
    configure_logging("supervisor", log_level())  # before the lock, which may log
    with data_lock(settings.data, keeps_secrets=True):
        if (settings.data / "restoring").exists():  # created by `controlplane/backup/restore_target.py`
            raise NotReady(f"a restore into {settings.data} was cut short: run `kelvin restore` again")
        become_subreaper()
        asyncio.run(supervise(settings))
