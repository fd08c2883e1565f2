"""`kelvin runtime`: one version, served by one process over TCP, with a cache agent of its own or its node's beside it.

What `kelvin up` is to a machine this is to a pod: it starts both, brings the agent back where it dies, and ends as the
runtime ends, with its status; but one that waits for versions has a fresh runtime follow each that ends, and nothing of
what that had. Nothing here is on the path of a request.
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
_LAST_FRAMES_S: Final = 10.0  # that a runtime takes beyond its drain, for what is answered and not yet read


class Pod:
    """Both processes, or the runtime alone where the node has an agent."""

    def __init__(self, settings: PodSettings, graves: ExitRecorder, lifeline_fd: int) -> None:
        self._settings = settings
        self._exit_recorder = graves
        self._lifeline_fd = lifeline_fd
        # The kubelet's liveness probe watches the runtime, and whether another one follows is decided here.
        self._runtime = Child(RUNTIME, is_restarted=False)
        self._cache = Child(CACHE)
        self._children = (self._cache, self._runtime) if settings.has_agent else (self._runtime,)
        self.group = ChildGroup(self._children, self._spawn, self._on_death)
        self._replace_task: asyncio.Task[None] | None = None
        self._generation = 0
        self._is_stopping = False
        self._ended = asyncio.Event()
        self.status: int | None = None  # of the runtime, as Popen has it

    def __repr__(self) -> str:
        return f"<Pod {self._runtime} {self._cache}>"

    def running_lifetime(self) -> LifetimeRecord | None:
        """How the runtime has lived until now; None before it is somebody's, and once it is dead."""
        return None if self._runtime.pid is None else self._exit_recorder.running_lifetime(self._runtime.pid)

    def start(self) -> None:
        """Both at once: the runtime imports while the agent makes its slabs."""
        if self._is_standby and self._settings.has_agent:
            clear_cache(self._settings.data)  # a container that ended may have left something here
        self._generation += 1
        for child in self._children:
            self.group.start(child)

    @property
    def _is_standby(self) -> bool:
        return self._settings.pod.parked is not None

    def _spawn(self, child: Child) -> None:
        first = self._settings.pod.runtime_id
        name = (
            first if self._generation == 1 else f"{first}-{self._generation}"
        )  # each life of a runtime is another one's
        environment = pod_environment(self._settings, self._lifeline_fd, name, uses_store=child.spec.uses_store)
        child.start(None, environment, self._lifeline_fd)

    def _on_death(self, reaped: ReapedChild, child: Child | None) -> None:
        """The runtime's life becomes a record. Where it waits for versions, another one follows it."""
        if child is self._runtime:
            self._exit_recorder.record_exit(reaped)
            if self._is_standby and not (child.refused or self._cache.refused or self._is_stopping):
                if reaped.status == 0:
                    child.restarts = Restarts()  # it was released
                self._replace_task = asyncio.get_running_loop().create_task(self._replace_runtime())
            else:
                self._finish(reaped.status)
        elif child is self._cache and child.refused and self._runtime.pid is not None:
            child.is_restarted = False  # the same again would end the same way
            self._runtime.signal(signal.SIGTERM)

    async def _replace_runtime(self) -> None:
        """Another runtime in the place of one that is dead, with another agent, whose cache is empty."""
        try:
            await asyncio.sleep(self._runtime.restarts.delay_s)
            await self.group.end([self._cache], KILL_AFTER_S)
            self._cache.is_restarted = True
            self.start()
        except Exception:  # a full disk: who started us is to begin again
            log.exception("no runtime follows")
            self._finish(1)

    def _finish(self, status: int) -> None:
        self.status = status
        self.group.stop_restarts()
        self._ended.set()

    async def wait_finished(self, stop: asyncio.Event) -> None:
        """Returns when the runtime is dead and none follows: by itself, or after `stop` and its drain. The agent
        outlives it.
        """
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
            self._finish(0)  # between two lives
            return
        await self.group.end([self._runtime], self._settings.drain_s + _LAST_FRAMES_S)


def clear_cache(data: Path) -> None:
    """All that a cache agent, which is dead, kept there. Raises OSError."""
    with suppress(FileNotFoundError):
        shutil.rmtree(data / "cache")


async def _supervise(settings: PodSettings) -> int:
    with (
        open_exit_recorder(settings.data) as (graves, spool),
        open_lifeline() as lifeline_fd,
        closing(SocketDirectory(settings.data / "run")) as directory,
    ):
        pod = Pod(settings, graves, lifeline_fd)
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        stop_on_signals(loop, stop.set)
        call_on_deaths(pod.group.reap_dead)
        began_s = time.monotonic()
        async with report_usage(settings, spool, pod.running_lifetime), Loops() as loops:
            pod.start()
            loops.start("watchdog", Watchdog(pod.group.watched, make_socket_probe(directory)).run)
            await pod.wait_finished(stop)
            await graves.wait_recorded(KILL_AFTER_S)
    log.info("ended", extra={"lived_s": round(time.monotonic() - began_s, 3)})
    assert pod.status is not None
    return pod.status


def run_pod(settings: PodSettings) -> int:
    """The whole of `kelvin runtime`; the runtime's exit status as Popen has it. Raises AlreadyRunning."""
    configure_logging("pod", log_level())  # the lock may have something to log
    with data_lock(settings.data):
        return asyncio.run(_supervise(settings))
