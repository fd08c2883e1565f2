"""`kelvin engine`: a zygote and a cache agent, by which a snapshotter has pushes gated and sealed; serves nobody else.

It brings back what dies. A standby is born for each job and ends with it, and what it computed is the platform's:
nobody is billed for it, so its life is no record.
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response

from contracts.errors import Refused, Unavailable
from contracts.jobs import ENGINE, GateJob, SealJob
from contracts.wire import decode, encode
from kelvin.settings import EngineSettings, engine_environment
from kelvin.supervisor.children import KILL_AFTER_S, SPECS, Child, bring_back, log_end
from kelvin.supervisor.lock import data_lock
from kelvin.supervisor.reaper import become_subreaper, call_on_deaths, children, reap
from kelvin.supervisor.watchdog import Watchdog, Watched, asking
from service.born import BornProcess, socket_name
from service.client import ServiceClient
from service.failures import install_failure_handlers
from service.first import while_asked
from service.jobs import JobDesk, Jobs
from service.log import configure_logging
from service.loops import Loops
from service.run import serve_until, stop_on_signals
from service.settings import log_level
from service.startup import BAD_SETTING_STATUS
from service.unix import SocketDirectory
from service.zygote import ZygoteClient

log = logging.getLogger(__name__)

FORK_S: Final = 10.0
PARK_S: Final = 30.0
TERM_S: Final = 2.0
ASK_S: Final = 2.0  # for each of the two to say that it is ready
DRAIN_S: Final = 30  # for a job under way; what is cut is repeated by whoever asked
_PROCESSES: Final = ("zygote", "cache")


class Engine:
    """Both processes, and the standbys that live. `stop` is set where one refuses its settings: so it would again."""

    def __init__(
        self, settings: EngineSettings, directory: SocketDirectory, lifeline_fd: int, stop: asyncio.Event
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._lifeline_fd = lifeline_fd
        self._stop = stop
        self._children = tuple(Child(spec) for spec in SPECS if spec.name in _PROCESSES)
        self._loops = Loops()
        self._bringing_back: set[asyncio.Task[None]] = set()
        self._deaths = asyncio.Event()
        self._zygote = ZygoteClient(directory)
        self._cache = ServiceClient(directory, "cache.sock", "the cache agent", limit=4)

    def __repr__(self) -> str:
        return f"<Engine {self._children}>"

    @property
    def status(self) -> int:
        """To end with."""
        return BAD_SETTING_STATUS if any(child.refused for child in self._children) else 0

    def start(self) -> None:
        """Both at once. What an engine before left of its standbys goes: none of them lives."""
        for left in (*self._directory.path.glob(socket_name("*")), *self._pages("[0-9]*")):
            if not left.is_dir():  # a foreign entry
                left.unlink(missing_ok=True)
        for child in self._children:
            self._start(child)

    def _start(self, child: Child) -> None:
        environment = engine_environment(self._settings, self._lifeline_fd, uses_store=child.spec.uses_store)
        child.start(None, environment, self._lifeline_fd)

    def collect(self) -> None:
        """Reap what died: of ours, what is to come back does; of a standby nothing is kept."""
        for reaped in reap():
            child = next((each for each in self._children if each.pid == reaped.pid), None)
            if child is None:
                for page in self._pages(str(reaped.pid)):
                    page.unlink(missing_ok=True)
                continue
            child.buried(reaped.status)
            log_end(child, reaped.status, is_expected=self._stop.is_set())
            if child.refused:
                self._stop.set()
            elif child.is_kept:
                task = self._loops.start("bring back", partial(self._bring_back, child), about=child.spec.name)
                self._bringing_back.add(task)
                task.add_done_callback(self._bringing_back.discard)
        self._deaths.set()

    def watched(self) -> list[Watched]:
        """Return the processes that should answer. A standby has a job, whose caller waits for it with a deadline."""
        return [watched for child in self._children if (watched := child.watched) is not None]

    async def _bring_back(self, child: Child) -> None:
        await bring_back(child, self._start, lambda: child.is_kept)

    @asynccontextmanager
    async def standby(self) -> AsyncIterator[BornProcess]:
        """One that is parked, and dead when the block was left. Raises Refused: Unavailable where none comes."""
        runtime_id = f"push-{secrets.token_hex(6)}"
        born = await self._zygote.fork(runtime_id, FORK_S)
        process = BornProcess(self._directory, runtime_id, born.pid, born.pidfd)
        limit_s = time.monotonic() + PARK_S
        try:
            if not await process.parks(lambda: time.monotonic() <= limit_s):
                raise Refused(Unavailable("the engine"))
            yield process
        finally:
            try:
                await process.end(TERM_S)
            finally:
                await process.close()

    async def is_ready(self) -> bool:
        """Whether a job would have what it takes."""
        try:
            await self._zygote.ping(ASK_S)
            async with self._cache.open("GET", "/readyz", timeout_s=ASK_S):
                return True
        except Refused:
            return False

    async def end(self) -> None:
        """All of them, standbys too. Returns when none is left, or the kernel holds one."""
        for child in self._children:
            child.is_kept = False
        for task in self._bringing_back:
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in children():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if await self._childless():
                break
        await self._cache.close()

    async def _childless(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_AFTER_S):
                while children():
                    self._deaths.clear()
                    await self._deaths.wait()
                return True
        return False

    def _pages(self, pid: str) -> tuple[Path, ...]:
        return tuple((self._directory.path / "meters").glob(f"{pid}.*"))


def make_app(jobs: Jobs, is_ready: Callable[[], Awaitable[bool]]) -> FastAPI:
    """The jobs at the control plane's paths, and health."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_failure_handlers(app)

    @app.post("/internal/v1/jobs/gate")
    async def gate(request: Request) -> Response:
        job = decode(await request.body(), GateJob)
        return _json(await while_asked(request.receive, jobs.gate(job)))

    @app.post("/internal/v1/jobs/seal")
    async def seal(request: Request) -> Response:
        job = decode(await request.body(), SealJob)
        return _json(await while_asked(request.receive, jobs.seal(job)))

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response(status_code=200)

    @app.get("/readyz")
    async def readyz() -> Response:
        return Response(status_code=200 if await is_ready() else 503)

    return app


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")


async def _supervise(settings: EngineSettings) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
    with closing(SocketDirectory(settings.data / "run")) as directory:
        engine = Engine(settings, directory, lifeline_read, stop)
        stop_on_signals(loop, stop.set)
        call_on_deaths(engine.collect)
        try:
            engine.start()
            app = make_app(JobDesk(engine.standby), engine.is_ready)
            async with Loops() as loops:
                loops.start("watchdog", Watchdog(engine.watched, asking(directory)).run)
                await serve_until(app, directory.listen(ENGINE), stop, DRAIN_S)
        finally:
            await engine.end()
            os.close(lifeline_read)
            os.close(lifeline_write)
    return engine.status


def run_engine(settings: EngineSettings) -> int:
    """The whole of `kelvin engine`; the exit status. Raises AlreadyRunning."""
    with data_lock(settings.data):
        configure_logging("engine", log_level())
        become_subreaper()
        return asyncio.run(_supervise(settings))
