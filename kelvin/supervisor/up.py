"""`kelvin up`: start the processes, say when all are ready, bring back what dies, drain in order, leave nothing."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from contracts.deadline import Deadline
from contracts.errors import Refused
from kelvin.policy.hanging import START_S
from kelvin.settings import UpSettings, child_environment
from kelvin.supervisor.children import KILL_AFTER_S, POLL_S, Child, ChildSpec, bring_back, log_end, specs_of
from kelvin.supervisor.desk import LedgerDesk
from kelvin.supervisor.graves import LIFETIME_PREFIX, Graves, recorded_lives
from kelvin.supervisor.lock import data_lock
from kelvin.supervisor.log_rotation import rotate_forever
from kelvin.supervisor.reaper import become_subreaper, call_on_deaths, children, reap
from kelvin.supervisor.succession import Hands, Succession
from kelvin.supervisor.watchdog import ANSWER_S, Watchdog, Watched, asking
from kelvin.tail import last_lines
from service.born import socket_name
from service.client import ServiceClient
from service.exits import REPLICAS, ExitNotes
from service.listener import LISTENER_VARIABLE, listen
from service.log import configure_logging
from service.loops import Loops
from service.run import stop_on_signals
from service.settings import log_level
from service.unix import SocketDirectory, peer_pid
from service.zygote import ZygoteClient
from spool.shipper import Shipper
from spool.spool import Spool

log = logging.getLogger(__name__)

HOPELESS_DEATHS: Final = 4  # before the first readiness


class NotReady(Exception):
    """A process did not become ready in time; the text names it and shows the end of its log."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What the ready line says."""

    url: str
    ca: Path
    key: Path
    admin_key: Path

    def __str__(self) -> str:
        return f"kelvin is ready: url={self.url} ca={self.ca} key={self.key} admin-key={self.admin_key}"


class Supervisor:
    """Owns every process of one data directory. Nothing here is on the path of a request."""

    def __init__(
        self,
        settings: UpSettings,
        directory: SocketDirectory,
        graves: Graves,
        lifeline_fd: int,
        listener: socket.socket | None,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._graves = graves
        self._lifeline_fd = lifeline_fd
        self._listener = listener  # kept open while the door is changed: who calls meanwhile waits, and is not refused
        self._environments = {uses: child_environment(settings, lifeline_fd, uses_store=uses) for uses in (False, True)}
        self._children = [Child(spec) for spec in specs_of(filters=settings.filters)]
        self._notes = ExitNotes(settings.data / "run")
        self._killed: dict[int, tuple[str, str]] = {}  # by pid of a hung process: its name, and why it is killed
        self._loops = Loops()
        self._deaths = asyncio.Event()
        self._draining = False
        hands = Hands(self._start, self._end, self._may_succeed, self._is_at)
        self._succession = Succession(self._children, hands, settings.data / "run", settings.ready_s, settings.drain_s)

    def __repr__(self) -> str:
        return f"<Supervisor {self._children}>"

    def start(self) -> None:
        """Start every process at once; each waits for what it needs by itself."""
        for child in self._children:
            self._start(child)

    def _start(self, child: Child) -> None:
        environment, fds = self._environments[child.spec.uses_store], [self._lifeline_fd]
        if child.spec.listens and self._listener is not None:
            fds.append(self._listener.fileno())
            environment = {**environment, LISTENER_VARIABLE: str(fds[-1])}
        child.start(self._settings.data / "logs", environment, *fds)

    def watched(self) -> list[Watched]:
        """Return every process that should answer: ours, and replicas and standbys, which the zygote forked."""
        if self._draining:
            return []
        ours = [watched for child in self._children if (watched := child.watched) is not None]
        alive = set(children())
        # A replica was asked over its socket to take its version.
        lives = ((pid, name, has_version) for pid, name, has_version in self._graves.lives() if pid in alive)
        return ours + [Watched(name, pid, socket_name(name), has_version) for pid, name, has_version in lives]

    def on_hung(self, hung: Watched, why: str) -> None:
        """Remember why a process is being killed: `collect` notes it when the process has ended."""
        self._killed[hung.pid] = hung.name, why

    def collect(self) -> None:
        """Reap what died: replicas become lifetime records, processes of ours come back."""
        for reaped in reap():
            name, why = self._killed.pop(reaped.pid, ("", None))
            child = next((child for child in self._children if child.pid == reaped.pid), None)
            if child is None:
                self._graves.bury(reaped)
                if why is not None:
                    self._note(REPLICAS, reaped.status, f"{name}: {why}")
                continue
            child.buried(reaped.status)
            log_end(child, reaped.status, is_expected=self._draining or not child.is_kept)
            if child.is_kept and not self._draining:
                self._note(child.spec.name, reaped.status, why)
            if not child.is_kept:
                self._children.remove(child)
            elif not self._draining:
                self._loops.start("bring back", partial(self._bring_back, child), about=child.spec.name)
        self._deaths.set()

    def _note(self, name: str, status: int, why: str | None) -> None:
        try:
            self._notes.add(name, status, int(time.time()), why)
        except OSError as error:
            log.warning("how a process ended can't be noted", extra={"child": name, "error": repr(error)})

    async def _bring_back(self, child: Child) -> None:
        await bring_back(child, self._start, lambda: child.is_kept and not self._draining)

    def restart_door(self) -> None:
        """Change the activator for another one, without a request that fails."""
        if not self._draining:
            self._succession.begin()

    async def _may_succeed(self) -> bool:
        return self._listener is not None and await self._is_ready("control.sock", "controlplane")

    async def _is_at(self, child: Child) -> bool:
        """Whether this very process answers at its socket, and is ready."""
        name = child.spec.socket
        assert name is not None
        try:
            with self._directory.connect(name) as connected:
                if peer_pid(connected) != child.pid:
                    return False
        except OSError:
            return False
        return await self._is_ready(name, child.spec.name)

    async def wait_ready(self) -> None:
        """Until every process says so. Raises NotReady."""
        waiting = [child.spec for child in self._children]
        limit = time.monotonic() + self._settings.ready_s
        while waiting:
            spec = waiting[0]
            if await self._is_up(spec):
                waiting.pop(0)
            elif (refused := self._refused()) is not None:
                raise NotReady(f"{refused} can't start: {self._log_tail(refused, lines=1)}")
            elif (dead := self._keeps_dying()) is not None:
                raise NotReady(f"{dead} dies at once, again and again\n{self._log_tail(dead)}")
            elif time.monotonic() > limit:
                raise NotReady(
                    f"{spec.name} is not ready after {self._settings.ready_s} s; KELVIN_READY_S gives it longer\n"
                    f"{self._log_tail(spec.name)}"
                )
            else:
                await asyncio.sleep(POLL_S)

    def _refused(self) -> str | None:
        """A process that ended over a setting: the same again would end the same way."""
        return next((child.spec.name for child in self._children if child.refused), None)

    def _keeps_dying(self) -> str | None:
        """A process that has not lived long enough to be ready, several times in a row."""
        return next((child.spec.name for child in self._children if child.restarts.deaths >= HOPELESS_DEATHS), None)

    async def _is_up(self, spec: ChildSpec) -> bool:
        if spec.socket is not None:
            return await self._is_ready(spec.socket, spec.name)
        try:
            await ZygoteClient(self._directory).ping(ANSWER_S)
        except Refused:
            return False
        return True

    async def _is_ready(self, socket_name: str, peer: str) -> bool:
        client = ServiceClient(self._directory, socket_name, peer)
        try:
            async with client.open("GET", "/readyz", timeout_s=2.0):
                return True
        except Refused:
            return False
        finally:
            await client.close()

    def _log_tail(self, name: str, lines: int = 15) -> str:
        path = self._settings.data / "logs" / f"{name}.log"
        return "\n".join(last_lines(path, lines)) if path.exists() else ""

    async def drain(self, shipper: Shipper) -> None:
        """Door first, then replicas, then what they needed; the ledger last, once it has heard of every death."""
        self._draining = True
        self._succession.cancel()
        await self._loops.close()
        if self._listener is not None:
            self._listener.close()  # with the activator's own, so that callers are refused from then on
        by_name = {child.spec.name: child for child in self._children}
        await self._end([child for child in self._children if child.spec.listens], self._settings.drain_s)
        await self._end([by_name["zygote"]], KILL_AFTER_S)
        await self._end_replicas(self._settings.drain_s)
        await self._graves.settled(KILL_AFTER_S)
        if not await shipper.flush(Deadline.after(KILL_AFTER_S, time.monotonic())):
            log.warning("lifetimes wait in the spool for the next start", extra={"records": shipper.backlog})
        behind = [by_name[name] for name in ("snapshotter", "cache", "filters") if name in by_name]
        await self._end(behind, KILL_AFTER_S)
        await self._end([by_name["controlplane"]], KILL_AFTER_S)

    async def _end(self, ending: list[Child], patience_s: float, number: int = signal.SIGTERM) -> None:
        for child in ending:
            child.signal(number)
        if not await self._gone(lambda: all(child.pid is None for child in ending), patience_s):
            for child in ending:
                log.error("killed after its time to drain", extra={"child": child.spec.name})
                child.signal(signal.SIGKILL)
            await self._gone(lambda: all(child.pid is None for child in ending), KILL_AFTER_S)

    async def _end_replicas(self, patience_s: float) -> None:
        def replicas() -> list[int]:
            ours = {child.pid for child in self._children}
            return [pid for pid in children() if pid not in ours]

        for number, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, KILL_AFTER_S)):
            for pid in replicas():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if await self._gone(lambda: not replicas(), patience):
                return

    async def _gone(self, is_gone: Callable[[], bool], patience_s: float) -> bool:
        limit = time.monotonic() + patience_s
        while not is_gone():
            left = limit - time.monotonic()
            if left <= 0:
                return False
            self._deaths.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.2)):
                    await self._deaths.wait()
            with contextlib.suppress(OSError):  # the next round tries again
                self.collect()
        return True


async def supervise(settings: UpSettings) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP. Raises NotReady; AlreadyRunning comes from the lock around it."""
    directory = SocketDirectory(settings.data / "run")
    source = f"{LIFETIME_PREFIX}{uuid.uuid4().hex[:12]}"
    spools = settings.data / "spool"
    recorded = recorded_lives(spools)
    spool = Spool.open(spools, source)
    graves = Graves(settings.data / "run" / "meters", spool, source)
    graves.recover(recorded)
    control = ServiceClient(directory, "control.sock", "control plane")
    desk = LedgerDesk(control, spools)
    shipper = Shipper(spool, desk.post_lifetimes)
    lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
    listener = _try_listen(settings)
    supervisor = Supervisor(settings, directory, graves, lifeline_read, listener)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    stop_on_signals(loop, stop.set)
    call_on_deaths(supervisor.collect)
    loop.add_signal_handler(signal.SIGUSR1, supervisor.restart_door)
    try:
        async with Loops() as loops:
            loops.start("shipper", shipper.run)
            loops.start("ledger recovery", desk.recover_forever)
            loops.start("log rotation", lambda: rotate_forever(settings.data / "logs"))
            start_s = max(START_S, settings.ready_s)  # a longer time to get ready holds for each process, too
            watchdog = Watchdog(supervisor.watched, asking(directory), supervisor.on_hung, start_s)
            loops.start("watchdog", watchdog.run)
            supervisor.start()
            try:
                await _until(stop, supervisor.wait_ready())
                if not stop.is_set():
                    print(_ready(settings), flush=True)
                    await stop.wait()
            finally:
                await supervisor.drain(shipper)
    finally:
        await control.close()
        spool.close()
        directory.close()
        if listener is not None:
            listener.close()
        os.close(lifeline_read)
        os.close(lifeline_write)


def _try_listen(settings: UpSettings) -> socket.socket | None:
    """None where the address is refused: the activator finds the same, and says so."""
    try:
        return listen(settings.host, settings.port)
    except OSError:
        return None


async def _until(stop: asyncio.Event, work: Coroutine[object, object, None]) -> None:
    """Do `work`, unless `stop` comes first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _ready(settings: UpSettings) -> Ready:
    data = settings.data
    url = f"https://localhost:{settings.port}"
    (data / "url").write_text(url + "\n")
    return Ready(url, data / "ca.pem", data / "default.key", data / "admin.key")


def run_up(settings: UpSettings) -> None:
    """Run `kelvin up` until it is stopped. Raises AlreadyRunning, OpenToOthers or NotReady."""
    configure_logging("supervisor", log_level())  # the lock may have something to log
    with data_lock(settings.data, keeps_secrets=True):
        if (settings.data / "restoring").exists():  # `controlplane/placing.py` puts it there
            raise NotReady(f"a restore into {settings.data} was cut short: run `kelvin restore` again")
        become_subreaper()
        asyncio.run(supervise(settings))
