"""Start, reap, restart, watch and end a group of child processes.

Each of `installation_supervisor.py`, `pod_supervisor.py` and `engine_supervisor.py` has one group; it defines the
group's processes and what a death means. `watchdog.py` finds hung processes. The zygote double-forks runtimes; they are
reaped here too, because this process is a subreaper (prctl(2)). A lifetime is measured here, from the kernel's start
time of the process until it is found dead, before it is reaped.
"""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Final

from kelvin.process.loops import Loops
from kelvin.process.procfs import start_time_ns
from kelvin.process.python_command import python_command
from kelvin.process.startup import BAD_SETTING_STATUS
from kelvin.supervisor.restart_policy import Restarts
from kelvin.supervisor.watchdog import WatchedProcess

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0  # pause before failed reaping is tried again
_PR_SET_CHILD_SUBREAPER: Final = 36
POLL_S: Final = 0.02  # between two checks of a process's state
KILL_AFTER_S: Final = 5.0
RESTART_POLL_S: Final = 0.2  # between two checks whether ending processes are gone, in case no signal arrives


@dataclass(frozen=True, slots=True)
class ReapedChild:
    """A child that was reaped. `status` is as in Popen.returncode. `died_ns` (CLOCK_MONOTONIC) is when it was found
    dead; `lived_us` is the time from its fork until then.
    """

    pid: int
    status: int
    lived_us: int
    died_ns: int
    cpu_us: int
    max_rss_kb: int


def call_on_deaths(reap_dead: Callable[[], None]) -> None:
    """Make the event loop call `reap_dead` when children die, and again after RETRY_S if it raises OSError. There is no
    second SIGCHLD for a death that could not be handled, such as for lack of file descriptors.
    """
    loop = asyncio.get_running_loop()

    def call() -> None:
        try:
            reap_dead()
        except OSError as error:
            log.warning("dead processes can't be collected; trying again", extra={"error": repr(error)})
            loop.call_later(RETRY_S, call)

    loop.add_signal_handler(signal.SIGCHLD, call)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init. Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap_children() -> Iterator[ReapedChild]:
    """Reap and yield every dead child."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None:
            return
        died_ns = time.monotonic_ns()
        lived_us = max(0, died_ns - start_time_ns(dead.si_pid)) // 1000
        pid, status, usage = os.wait4(dead.si_pid, 0)
        yield ReapedChild(
            pid,
            os.waitstatus_to_exitcode(status),
            lived_us,
            died_ns,
            int((usage.ru_utime + usage.ru_stime) * 1e6),
            usage.ru_maxrss,
        )


def children() -> tuple[int, ...]:
    """Return the pids of all children, including orphans that were handed to this process."""
    pids: list[int] = []
    for task in os.listdir("/proc/self/task"):
        # The thread may have ended meanwhile. Its children then belong to another thread.
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/children") as listing:
            pids.extend(int(pid) for pid in listing.read().split())
    return tuple(pids)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process of an installation. `socket` answers `/healthz` and `/readyz`; None: it is probed in another way."""

    name: str
    module: str
    socket: str | None
    uses_store: bool = False
    # On the front door's socket, which the supervisor keeps open.
    listens: bool = False


# In order of start. `Supervisor.drain` ends them in another order.
CHILD_SPECS: Final = (
    ChildSpec("zygote", "runtime.app.zygote", None),
    ChildSpec("cache", "weightcache", "cache.sock", uses_store=True),
    ChildSpec("controlplane", "controlplane", "control.sock"),
    ChildSpec("snapshotter", "snapshotter", "snapshotter.sock", uses_store=True),
    ChildSpec("activator", "activator", "activator.sock", listens=True),
)

FILTERS: Final = ChildSpec("filters", "kelvin.filters", "filters.sock")


def specs_of(*, filters: bool) -> tuple[ChildSpec, ...]:
    """Return the processes of an installation. Replicas need the filter process, if there is one, until they end."""
    return (FILTERS, *CHILD_SPECS) if filters else CHILD_SPECS


@dataclass(slots=True, eq=False)
class Child:
    """A child process that runs, or waits for its restart."""

    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    started_at_s: float = 0.0
    restarts: Restarts = field(default_factory=Restarts)
    refused: bool = False  # its exit status says that its settings are wrong
    is_restarted: bool = True  # restart it when it dies; if False, it leaves its group instead
    restart: asyncio.Task[None] | None = None  # the latest restart

    def __repr__(self) -> str:
        pid = self.process.pid if self.process else "down"
        return f"<Child {self.spec.name} pid={pid} deaths={self.restarts.deaths}>"

    @property
    def pid(self) -> int | None:
        """Process id, or None while it is down."""
        return self.process.pid if self.process else None

    @property
    def watched(self) -> WatchedProcess | None:
        """Return the process for the watchdog to probe. None while it is down or ending."""
        return (
            WatchedProcess(self.spec.name, self.pid, self.spec.socket)
            if self.pid is not None and self.is_restarted
            else None
        )

    def start(self, logs: Path | None, environment: Mapping[str, str], *fds: int) -> None:
        """Start the process in a session of its own, so that a terminal's Ctrl-C reaches only the supervisor. It
        inherits `fds`. Without `logs`, it writes to our standard output. Raises OSError.
        """
        with _open_log(logs, self.spec.name) as sink:
            self.process = subprocess.Popen(
                python_command(self.spec.module),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=fds,
                start_new_session=True,
            )
        self.started_at_s = time.monotonic()

    def mark_reaped(self, status: int) -> None:
        """Record the exit status. The reaper collected the process, so Popen must not wait for it."""
        assert self.process is not None
        self.process.returncode = status
        self.refused = status == BAD_SETTING_STATUS
        self.process = None
        self.restarts = self.restarts.after_death(time.monotonic() - self.started_at_s)

    def signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process is down."""
        if self.process is not None:
            # Popen.send_signal polls first and might reap the process instead of the reaper. The pid can't be reused
            # before it is reaped.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


class ChildGroup:
    """The children of one supervisor. A dead child is restarted with back-off, until `stop_restarts`."""

    def __init__(
        self,
        members: Iterable[Child],
        spawn: Callable[[Child], None],
        on_death: Callable[[ReapedChild, Child | None], None],
    ) -> None:
        """`spawn` starts a child's process. Raises OSError. `on_death` gets every reaped process and its child, or None
        for an orphan that a child forked. It may set `is_restarted` to False, so that the child is not restarted.
        """
        self.members = list(members)  # in order of start
        self.is_draining = False
        self._spawn = spawn
        self._on_death = on_death
        self._loops = Loops()
        self._deaths = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ChildGroup {self.members}>"

    def start_all(self) -> None:
        """Start all children at once. Each waits by itself for the services it needs. Raises OSError."""
        for child in tuple(self.members):
            self.start(child)

    def start(self, child: Child) -> None:
        """Start a child of the group, or a new one, which joins it. Raises OSError."""
        self._spawn(child)
        if child not in self.members:
            self.members.append(child)

    def reap_dead(self) -> None:
        """Reap dead processes. Register it with `call_on_deaths`. Raises OSError."""
        for reaped in reap_children():
            child = next((each for each in self.members if each.pid == reaped.pid), None)
            if child is not None:
                child.mark_reaped(reaped.status)
                log_exit(child, reaped.status, is_expected=self.is_draining or not child.is_restarted)
            self._on_death(reaped, child)
            if child is None:
                continue
            if not child.is_restarted:
                self.members.remove(child)
            elif not self.is_draining:
                child.restart = self._loops.start("bring back", partial(self._bring_back, child), about=child.spec.name)
        self._deaths.set()

    def watched(self) -> list[WatchedProcess]:
        """Return the children that the watchdog should probe."""
        found = [] if self.is_draining else [child.watched for child in self.members]
        return [watched for watched in found if watched is not None]

    def stop_restarts(self) -> None:
        """Restart no child from now on: the whole group is about to end."""
        self.is_draining = True
        for child in self.members:
            _cancel_restart(child)

    async def end(self, ending: Collection[Child], patience_s: float, number: int = signal.SIGTERM) -> None:
        """Signal these children, and kill them after `patience_s`. Return when they are gone, or stuck in the kernel.
        They are not restarted, and leave the group as they die.
        """
        for child in ending:
            child.is_restarted = False
            _cancel_restart(child)
        await self._end(lambda: [child.pid for child in ending if child.pid is not None], patience_s, number)

    async def end_descendants(self, patience_s: float, spared: Collection[Child] = ()) -> None:
        """End all child processes and orphans except `spared`, as `end` does."""

        def living() -> list[int]:
            spared_pids = {child.pid for child in spared}
            return [pid for pid in children() if pid not in spared_pids]

        await self._end(living, patience_s, signal.SIGTERM)

    async def _end(self, living: Callable[[], list[int]], patience_s: float, number: int) -> None:
        for each, limit_s in ((number, patience_s), (signal.SIGKILL, KILL_AFTER_S)):
            for pid in living():
                if each == signal.SIGKILL:
                    name = next((child.spec.name for child in self.members if child.pid == pid), "forked")
                    log.error("killed: it did not end in time", extra={"child": name, "pid": pid})
                with suppress(ProcessLookupError):
                    os.kill(pid, each)
            if await self._are_gone(living, limit_s):
                return

    async def _are_gone(self, living: Callable[[], list[int]], patience_s: float) -> bool:
        limit_s = time.monotonic() + patience_s
        while living():
            left_s = limit_s - time.monotonic()
            if left_s <= 0:
                return False
            self._deaths.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, RESTART_POLL_S)):
                    await self._deaths.wait()
            with suppress(OSError):  # the next round tries again
                self.reap_dead()
        return True

    async def _bring_back(self, child: Child) -> None:
        """Restart a dead child after its back-off, unless it is to end. A start that the system refuses (no memory,
        process, descriptor, or disk space) counts as a death. No SIGCHLD follows it, so it is retried here.
        """
        await asyncio.sleep(child.restarts.delay_s)
        while child.is_restarted and not self.is_draining:
            try:
                self.start(child)
                return
            except OSError as error:
                child.restarts = child.restarts.after_death(0.0)
                why = {"child": child.spec.name, "error": repr(error), "deaths": child.restarts.deaths}
                log.warning("a process can't be started; trying again", extra=why)
            await asyncio.sleep(child.restarts.delay_s)


def _cancel_restart(child: Child) -> None:
    if child.restart is not None:
        child.restart.cancel()


def log_exit(child: Child, status: int, *, is_expected: bool) -> None:
    """Log that a process ended: a warning, unless it was told to end and exited with 0 or by SIGTERM."""
    extra = {"child": child.spec.name, "status": status}
    if is_expected and status in (0, -signal.SIGTERM):
        log.info("a process ended", extra=extra)
    else:
        log.warning("a process died", extra=extra)


@contextmanager
def open_lifeline() -> Iterator[int]:
    """Yield a pipe's read end for children to inherit. It reaches its end when this process dies; they then exit."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def _open_log(logs: Path | None, name: str) -> Iterator[IO[bytes] | None]:
    if logs is None:
        yield None
        return
    logs.mkdir(exist_ok=True)
    with (logs / f"{name}.log").open("ab") as sink:
        yield sink
