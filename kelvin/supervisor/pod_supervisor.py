"""Supervisor of `kelvin runtime`: one runtime process over TCP, with its own cache agent or its node's.

It starts both processes, restarts the agent when it dies, and ends with the runtime and its status. If the pod is a
standby, a fresh runtime with an empty cache follows each runtime that ends. No request passes through here.
"""

import asyncio
import logging
import shutil
import signal
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.log import configure_logging
from kelvin.process.loops import Loops
from kelvin.process.service_lifecycle import stop_on_signals
from kelvin.process.settings import log_level
from kelvin.supervisor.child_group import (
    CHILD_SPECS,
    KILL_AFTER_S,
    Child,
    ChildGroup,
    ChildSpec,
    ReapedChild,
    call_on_deaths,
    open_lifeline,
)
from kelvin.supervisor.data_lock import data_lock
from kelvin.supervisor.exit_recorder import ExitRecorder, open_exit_recorder
from kelvin.supervisor.ledger_client import report_usage
from kelvin.supervisor.restart_policy import Restarts
from kelvin.supervisor.settings import PodSettings, pod_environment
from kelvin.supervisor.watchdog import Watchdog, make_socket_probe

log = logging.getLogger(__name__)

RUNTIME: Final = ChildSpec("runtime", "runtime.app.pod", None)
CACHE: Final = next(spec for spec in CHILD_SPECS if spec.name == "cache")
_LAST_FRAMES_S: Final = 10.0  # time beyond the runtime's drain for clients to read the last bytes


class PodSupervisor:
    """The runtime and its cache agent, or the runtime alone if the node has an agent."""

    def __init__(self, settings: PodSettings, exit_recorder: ExitRecorder, lifeline_fd: int) -> None:
        self._settings = settings
        self._exit_recorder = exit_recorder
        self._lifeline_fd = lifeline_fd
        # The kubelet's liveness probe watches the runtime. This class decides whether another runtime follows.
        self._runtime = Child(RUNTIME, is_restarted=False)
        self._cache = Child(CACHE)
        self._children = (self._cache, self._runtime) if settings.has_agent else (self._runtime,)
        self.group = ChildGroup(self._children, self._spawn, self._on_death)
        self._replace_task: asyncio.Task[None] | None = None
        self._generation = 0
        self._is_stopping = False
        self._ended = asyncio.Event()
        self.status: int | None = None  # the runtime's exit status, as in Popen.returncode

    def __repr__(self) -> str:
        return f"<PodSupervisor {self._runtime} {self._cache}>"

    def running_lifetime(self) -> LifetimeRecord | None:
        """Return the runtime's lifetime up to now. None before it has a tenant, and after its death."""
        return None if self._runtime.pid is None else self._exit_recorder.running_lifetime(self._runtime.pid)

    def start(self) -> None:
        """Start both processes at once: the runtime imports modules while the agent creates its slabs."""
        if self._is_standby and self._settings.has_agent:
            clear_cache(self._settings.data)  # an earlier container may have left files
        self._generation += 1
        for child in self._children:
            self.group.start(child)

    @property
    def _is_standby(self) -> bool:
        return self._settings.pod.parked is not None

    def _spawn(self, child: Child) -> None:
        first = self._settings.pod.runtime_id
        # Each process is a runtime of its own, so each needs its own id.
        name = first if self._generation == 1 else f"{first}-{self._generation}"
        environment = pod_environment(self._settings, self._lifeline_fd, name, uses_store=child.spec.uses_store)
        child.start(None, environment, self._lifeline_fd)

    def _on_death(self, reaped: ReapedChild, child: Child | None) -> None:
        """Handle the death of one of the two processes.

        1. The runtime of a standby pod died: start another one, unless the pod stops or a process refuses its settings.
        2. Any other runtime died: the pod ends with its status.
        3. The agent refused its settings: end the runtime. After any other death, the group restarts the agent.
        """
        if child is self._runtime:
            self._exit_recorder.record_exit(reaped)
            # (1)
            if self._is_standby and not (child.refused or self._cache.refused or self._is_stopping):
                if reaped.status == 0:
                    child.restarts = Restarts()  # its version was released: no failure
                self._replace_task = asyncio.get_running_loop().create_task(self._replace_runtime())
            # (2)
            else:
                self._finish(reaped.status)
        # (3)
        elif child is self._cache and child.refused and self._runtime.pid is not None:
            child.is_restarted = False  # it would refuse its settings again
            self._runtime.signal(signal.SIGTERM)

    async def _replace_runtime(self) -> None:
        """Start another runtime after one died, with another agent and an empty cache."""
        try:
            await asyncio.sleep(self._runtime.restarts.delay_s)
            await self.group.end([self._cache], KILL_AFTER_S)
            self._cache.is_restarted = True
            self.start()
        except Exception:  # such as a full disk: end, so that the pod is restarted
            log.exception("the next runtime can't be started")
            self._finish(1)

    def _finish(self, status: int) -> None:
        self.status = status
        self.group.stop_restarts()
        self._ended.set()

    async def wait_finished(self, stop: asyncio.Event) -> None:
        """Return when the runtime is dead and none follows, by itself or after `stop` and drain. The agent is last."""
        ending = asyncio.ensure_future(self._end_with(stop))
        try:
            await self._ended.wait()
        finally:
            ending.cancel()
            self.group.stop_restarts()
            if self._replace_task is not None:
                self._replace_task.cancel()
            await self.group.end([self._cache], KILL_AFTER_S)

    async def _end_with(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._is_stopping = True
        if self._replace_task is not None:
            self._replace_task.cancel()
        if self._runtime.pid is None:
            self._finish(0)  # between two runtimes
            return
        await self.group.end([self._runtime], self._settings.drain_s + _LAST_FRAMES_S)


def clear_cache(data: Path) -> None:
    """Remove the files of a dead cache agent. Raises OSError."""
    with suppress(FileNotFoundError):
        shutil.rmtree(data / "cache")


async def _supervise(settings: PodSettings) -> int:
    with (
        open_exit_recorder(settings.data) as (exit_recorder, spool),
        open_lifeline() as lifeline_fd,
        closing(SocketDirectory(settings.data / "run")) as directory,
    ):
        pod = PodSupervisor(settings, exit_recorder, lifeline_fd)
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        stop_on_signals(loop, stop.set)
        call_on_deaths(pod.group.reap_dead)
        began_s = time.monotonic()
        async with report_usage(settings, spool, pod.running_lifetime), Loops() as loops:
            pod.start()
            loops.start("watchdog", Watchdog(pod.group.watched, make_socket_probe(directory)).run)
            await pod.wait_finished(stop)
            await exit_recorder.wait_recorded(KILL_AFTER_S)
    log.info("ended", extra={"lived_s": round(time.monotonic() - began_s, 3)})
    assert pod.status is not None
    return pod.status


def run_pod(settings: PodSettings) -> int:
    """Run `kelvin runtime` and return the runtime's exit status, as in Popen.returncode. Raises AlreadyRunning."""
    configure_logging("pod", log_level())  # before the lock, which may log
    with data_lock(settings.data):
        return asyncio.run(_supervise(settings))
