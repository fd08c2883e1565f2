"""`kelvin runtime`: one version, served by one process over TCP, with a cache agent of its own or its node's beside it.

What `kelvin up` is to a machine this is to a pod: it starts both, brings the agent back where it dies, and ends as the
runtime ends, with its status; but one that waits for versions has a fresh runtime follow each that ends, and nothing of
what that had. Nothing here is on the path of a request.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Final

from contracts.usage import LifetimeRecord
from kelvin.policy.restarts import Restarts
from kelvin.settings import PodSettings, pod_environment
from kelvin.supervisor.children import KILL_AFTER_S, SPECS, Child, ChildSpec, bring_back
from kelvin.supervisor.graves import LIFETIME_PREFIX, Graves, recorded_lives
from kelvin.supervisor.lock import data_lock
from kelvin.supervisor.reaper import call_on_deaths, reap
from kelvin.supervisor.telling import telling
from kelvin.supervisor.watchdog import Watchdog, Watched, asking
from service.log import configure_logging
from service.loops import Loops
from service.run import stop_on_signals
from service.settings import log_level
from service.unix import SocketDirectory
from spool.spool import Spool

log = logging.getLogger(__name__)

RUNTIME: Final = ChildSpec("runtime", "runtime.pod", None)
CACHE: Final = next(spec for spec in SPECS if spec.name == "cache")
_LAST_FRAMES_S: Final = 10.0  # that a runtime takes beyond its drain, for what is answered and not yet read


class Pod:
    """Both processes, or the runtime alone where the node has an agent."""

    def __init__(self, settings: PodSettings, graves: Graves, lifeline_fd: int) -> None:
        self._settings = settings
        self._graves = graves
        self._lifeline_fd = lifeline_fd
        self._runtime = Child(RUNTIME)
        self._cache = Child(CACHE)
        self._bringing_back: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._lives = 0
        self._loops = Loops()
        self._deaths = asyncio.Event()
        self.status: int | None = None  # of the runtime, as Popen has it

    def __repr__(self) -> str:
        return f"<Pod {self._runtime} {self._cache}>"

    def so_far(self) -> LifetimeRecord | None:
        """How the runtime has lived until now; None before it is somebody's, and once it is dead."""
        return None if self._runtime.pid is None else self._graves.so_far(self._runtime.pid)

    def start(self) -> None:
        """Both at once: the runtime imports while the agent makes its slabs."""
        if self._parks and self._settings.has_agent:
            forget(self._settings.data)  # a container that ended may have left something here
        self._lives += 1
        for child in (self._cache, self._runtime) if self._settings.has_agent else (self._runtime,):
            self._start(child)

    @property
    def _parks(self) -> bool:
        return self._settings.pod.parked is not None

    def _start(self, child: Child) -> None:
        first = self._settings.pod.runtime_id
        name = first if self._lives == 1 else f"{first}-{self._lives}"  # each life of a runtime is another one's
        environment = pod_environment(self._settings, self._lifeline_fd, name, uses_store=child.spec.uses_store)
        child.start(None, environment, self._lifeline_fd)

    def collect(self) -> None:
        """Reap what died: the runtime's life becomes a record, the agent comes back."""
        for reaped in reap():
            if reaped.pid == self._runtime.pid:
                self._graves.bury(reaped)
                self._runtime.buried(reaped.status)
                log.info("the runtime ended", extra={"status": reaped.status})
                if self._parks and not (self._runtime.refused or self._cache.refused) and self._runtime.is_kept:
                    if reaped.status == 0:
                        self._runtime.restarts = Restarts()  # it was released
                    self._renewing = asyncio.get_running_loop().create_task(self._renew())
                else:
                    self.status = reaped.status
            elif reaped.pid == self._cache.pid:
                self._cache.buried(reaped.status)
                log.warning("the cache agent died", extra={"status": reaped.status})
                if self._cache.refused and self._runtime.pid is not None:
                    self._runtime.signal(signal.SIGTERM)  # the same again would end the same way
                elif self.status is None and self._cache.is_kept:
                    self._bringing_back = self._loops.start("bring back", self._bring_back)
        self._deaths.set()

    def watched(self) -> list[Watched]:
        """Return the cache agent. The kubelet's liveness probe watches the runtime."""
        return [] if self._cache.watched is None else [self._cache.watched]

    async def _bring_back(self) -> None:
        await bring_back(self._cache, self._start, lambda: self.status is None and self._cache.is_kept)

    async def _renew(self) -> None:
        """Another runtime in the place of one that is dead, with another agent, whose cache is empty."""
        try:
            await asyncio.sleep(self._runtime.restarts.delay_s)
            self._cache.is_kept = False
            if self._bringing_back is not None:
                self._bringing_back.cancel()  # one that died a moment ago is begun below
            await self._end(self._cache, KILL_AFTER_S)
            self._cache.is_kept = True
            self.start()
        except Exception:  # a full disk: who started us is to begin again
            log.exception("no runtime follows")
            self._over(1)

    def _over(self, status: int) -> None:
        self.status = status
        self._deaths.set()

    async def until_over(self, stop: asyncio.Event) -> None:
        """Returns when the runtime is dead and none follows: by itself, or after `stop` and its drain. The agent
        outlives it.
        """
        ending = asyncio.ensure_future(self._end_with(stop))
        try:
            while self.status is None:
                self._deaths.clear()
                await self._deaths.wait()
        finally:
            ending.cancel()
            self._cache.is_kept = False
            if self._renewing is not None:
                self._renewing.cancel()
            if self._bringing_back is not None:
                self._bringing_back.cancel()
            await self._end(self._cache, KILL_AFTER_S)

    async def _end_with(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._runtime.is_kept = False
        if self._renewing is not None:
            self._renewing.cancel()
        if self._runtime.pid is None:
            self._over(0)  # between two lives
            return
        await self._end(self._runtime, self._settings.drain_s + _LAST_FRAMES_S)

    async def _end(self, child: Child, patience_s: float) -> None:
        child.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._gone(child)
            return
        log.error("killed after its time to drain", extra={"child": child.spec.name})
        child.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_AFTER_S):
                await self._gone(child)

    async def _gone(self, child: Child) -> None:
        while child.pid is not None:
            self._deaths.clear()
            await self._deaths.wait()


def forget(data: Path) -> None:
    """All that a cache agent, which is dead, kept there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(data / "cache")


async def _supervise(settings: PodSettings) -> int:
    source = f"{LIFETIME_PREFIX}{uuid.uuid4().hex[:12]}"
    spools = settings.data / "spool"
    recorded = recorded_lives(spools)
    spool = Spool.open(spools, source)
    graves = Graves(settings.data / "run" / "meters", spool, source)
    graves.recover(recorded)
    lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
    pod = Pod(settings, graves, lifeline_read)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    stop_on_signals(loop, stop.set)
    call_on_deaths(pod.collect)
    began_s = time.monotonic()
    try:
        with closing(SocketDirectory(settings.data / "run")) as directory:
            async with telling(settings, spool, pod.so_far), Loops() as loops:
                pod.start()
                loops.start("watchdog", Watchdog(pod.watched, asking(directory)).run)
                await pod.until_over(stop)
                await graves.settled(KILL_AFTER_S)
    finally:
        spool.close()
        os.close(lifeline_read)
        os.close(lifeline_write)
    log.info("ended", extra={"lived_s": round(time.monotonic() - began_s, 3)})
    assert pod.status is not None
    return pod.status


def run_pod(settings: PodSettings) -> int:
    """The whole of `kelvin runtime`; the runtime's exit status as Popen has it. Raises AlreadyRunning."""
    with data_lock(settings.data):
        configure_logging("pod", log_level())
        return asyncio.run(_supervise(settings))
