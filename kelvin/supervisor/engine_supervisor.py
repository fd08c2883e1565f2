"""Supervisor of `kelvin engine`: a zygote and a cache agent that gate and seal pushes for a snapshotter.

Dead processes are restarted. A standby is forked for each job and ends with it. The job's compute time belongs to the
platform and is not billed, so no lifetime is recorded.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Response

from kelvin.contracts.artifacts.runtime_control import ENGINE_SOCKET
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.ipc.engine_jobs import JobRunner, PushJobs, job_routes
from kelvin.ipc.failure_responses import install_failure_handlers
from kelvin.ipc.forked_process import ForkedProcess, socket_name
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.zygote_client import ZygoteClient
from kelvin.process.log import configure_logging
from kelvin.process.loops import Loops
from kelvin.process.service_lifecycle import serve_until, stop_on_signals
from kelvin.process.settings import log_level
from kelvin.process.startup import BAD_SETTING_STATUS
from kelvin.supervisor.child_group import (
    CHILD_SPECS,
    KILL_AFTER_S,
    Child,
    ChildGroup,
    ReapedChild,
    become_subreaper,
    call_on_deaths,
    open_lifeline,
)
from kelvin.supervisor.data_lock import data_lock
from kelvin.supervisor.settings import EngineSettings, engine_environment
from kelvin.supervisor.watchdog import Watchdog, is_ready, make_socket_probe

FORK_S: Final = 10.0
PARK_S: Final = 30.0
TERM_S: Final = 2.0
DRAIN_S: Final = 30  # for running jobs; the snapshotter repeats an interrupted one
_PROCESSES: Final = ("zygote", "cache")


class EngineSupervisor:
    """The two processes and the running standbys. `stop` is set if a process refuses its settings."""

    def __init__(
        self, settings: EngineSettings, directory: SocketDirectory, lifeline_fd: int, stop: asyncio.Event
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._lifeline_fd = lifeline_fd
        self._stop = stop
        self.group = ChildGroup(
            (Child(spec) for spec in CHILD_SPECS if spec.name in _PROCESSES), self._spawn, self._on_death
        )
        self._zygote = ZygoteClient(directory)
        self.status = 0  # exit status of this supervisor

    def __repr__(self) -> str:
        return f"<EngineSupervisor {self.group}>"

    def start(self) -> None:
        """Start both processes. First remove sockets and meter pages of dead standbys of an earlier engine."""
        for left in (*self._directory.path.glob(socket_name("*")), *self._pages("[0-9]*")):
            if not left.is_dir():  # a directory is not ours
                left.unlink(missing_ok=True)
        self.group.start_all()

    def _spawn(self, child: Child) -> None:
        environment = engine_environment(self._settings, self._lifeline_fd, uses_store=child.spec.uses_store)
        child.start(None, environment, self._lifeline_fd)

    def _on_death(self, reaped: ReapedChild, child: Child | None) -> None:
        """Remove a dead standby's meter page. The caller of its job notices by a deadline."""
        if child is None:
            for page in self._pages(str(reaped.pid)):
                page.unlink(missing_ok=True)
        elif child.refused:
            self.status = BAD_SETTING_STATUS
            self.group.stop_restarts()
            self._stop.set()

    @asynccontextmanager
    async def standby(self) -> AsyncIterator[ForkedProcess]:
        """Yield a parked standby, which is dead after the block. Raises Refused(Unavailable) if none becomes ready."""
        runtime_id = f"push-{secrets.token_hex(6)}"
        forked = await self._zygote.fork(runtime_id, FORK_S)
        process = ForkedProcess(self._directory, runtime_id, forked.pid, forked.pidfd)
        limit_s = time.monotonic() + PARK_S
        try:
            if not await process.wait_parked(lambda: time.monotonic() <= limit_s):
                raise Refused(Unavailable("the engine"))
            yield process
        finally:
            try:
                await process.end(TERM_S)
            finally:
                await process.close()

    async def is_ready(self) -> bool:
        """Return whether a job could run now."""
        for spec in [child.spec for child in self.group.members]:
            if not await is_ready(self._directory, spec.name, spec.socket):
                return False
        return True

    async def end(self) -> None:
        """End all processes and standbys. Return when they are gone, or stuck in the kernel."""
        self.group.stop_restarts()
        await self.group.end_descendants(KILL_AFTER_S)

    def _pages(self, pid: str) -> tuple[Path, ...]:
        return tuple((self._directory.path / "meters").glob(f"{pid}.*"))


def make_app(jobs: PushJobs, is_ready: Callable[[], Awaitable[bool]]) -> FastAPI:
    """Return the API: the jobs at the control plane's paths, and health."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_failure_handlers(app)
    app.router.routes.extend(job_routes(jobs))

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response(status_code=200)

    @app.get("/readyz")
    async def readyz() -> Response:
        return Response(status_code=200 if await is_ready() else 503)

    return app


async def _supervise(settings: EngineSettings) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    with open_lifeline() as lifeline_fd, closing(SocketDirectory(settings.data / "run")) as directory:
        engine = EngineSupervisor(settings, directory, lifeline_fd, stop)
        stop_on_signals(loop, stop.set)
        call_on_deaths(engine.group.reap_dead)
        try:
            engine.start()
            app = make_app(JobRunner(engine.standby), engine.is_ready)
            async with Loops() as loops:
                loops.start("watchdog", Watchdog(engine.group.watched, make_socket_probe(directory)).run)
                await serve_until(app, directory.listen(ENGINE_SOCKET), stop, DRAIN_S)
        finally:
            await engine.end()
    return engine.status


def run_engine(settings: EngineSettings) -> int:
    """Run `kelvin engine` and return its exit status. Raises AlreadyRunning."""
    configure_logging("engine", log_level())  # before the lock, which may log
    with data_lock(settings.data):
        become_subreaper()
        return asyncio.run(_supervise(settings))
