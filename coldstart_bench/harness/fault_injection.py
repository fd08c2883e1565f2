"""Inject faults into an installation under load, and measure how long it takes to be ready again."""

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from coldstart_bench.clock import SteppedClock
from coldstart_bench.harness.installation import Installation, InstallationFailed, free_port
from coldstart_bench.harness.polling import poll_until_true
from coldstart_bench.harness.service_runner import running_service

STEP_S: Final = 600
WHOLE_S: Final = 60.0
POLL_S: Final = 0.05  # precision of recovery times


class FaultEvent(msgspec.Struct, frozen=True):
    """An injected fault, and the seconds until the whole installation was ready again (None: it was not). `failed` is
    why the fault could not be injected.
    """

    at_s: float
    what: str
    whole_after_s: float | None
    failed: str = ""


class RedisServer:
    """A Redis server that can be killed. It restarts empty on the same port."""

    def __init__(self, binary: str, scratch: Path) -> None:
        self._command = [binary, "--port", str(free_port()), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._log = scratch / "redis.log"
        self._stack = contextlib.ExitStack()
        self._pid = 0

    @property
    def url(self) -> str:
        """The server's redis:// URL."""
        return f"redis://127.0.0.1:{self._command[2]}"

    def start(self) -> None:
        """Start it and wait until it accepts connections."""
        up = running_service(self._command, os.environ, self._log, self._answers, "redis-server")
        self._pid = self._stack.enter_context(up)

    def kill(self) -> None:
        """Kill it with SIGKILL and start it again."""
        os.kill(self._pid, signal.SIGKILL)
        self.stop()
        self.start()

    def stop(self) -> None:
        """Stop it and all its processes."""
        self._stack.close()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", int(self._command[2])), timeout=1)
            connection.close()
            return True
        return False


def try_find_redis() -> str | None:
    """Return the path of redis-server: beside this interpreter, where a wheel puts it, or in PATH."""
    places = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    return shutil.which("redis-server", path=os.pathsep.join(places))


@contextmanager
def running_redis(scratch: Path) -> Iterator[RedisServer | None]:
    """Run a Redis server until the block ends. Yields None if it is not installed."""
    if (binary := try_find_redis()) is None:
        yield None
        return
    redis = RedisServer(binary, scratch)
    redis.start()
    try:
        yield redis
    finally:
        redis.stop()


class FaultInjector:
    """Injects a fixed list of faults in turn, over and over."""

    def __init__(self, kelvin: Installation, model: str, redis: RedisServer | None, clock: SteppedClock) -> None:
        self._kelvin, self._model = kelvin, model
        self._killed = set[int]()
        self._all: list[tuple[str, Callable[[], None], Callable[[], bool]]] = [
            ("SIGKILL activator", lambda: self._kill("activator"), self.is_ready),
            ("SIGKILL runtime", self._kill_runtime, self.serves),
            ("SIGKILL control plane", lambda: self._kill("controlplane"), self.is_ready),
            ("clock 600 s ahead", lambda: clock.step(STEP_S), self.is_ready),
            ("clock 600 s behind", lambda: clock.step(-STEP_S), self.is_ready),
            ("clock right again", lambda: clock.step(0), self.is_ready),
        ]
        if redis is not None:
            self._all.insert(2, ("SIGKILL Redis", redis.kill, self.is_ready))

    def run(self, every_s: float, until: float, is_useless: Callable[[], bool]) -> list[FaultEvent]:
        """Inject a fault every `every_s` seconds, until the monotonic time `until` or until `is_useless`."""
        began, found = time.monotonic(), list[FaultEvent]()
        while (at := began + (len(found) + 1) * every_s) < until - every_s / 2:
            if poll_until_true(is_useless, at - time.monotonic()):
                break
            what, do, is_over = self._all[len(found) % len(self._all)]
            done, failed = time.monotonic(), ""
            try:
                do()
            except (InstallationFailed, OSError) as error:
                failed = str(error)
            found.append(FaultEvent(done - began, what, self.recovery_time_s(done, is_over), failed))
        return found

    def recovery_time_s(self, since: float, is_over: Callable[[], bool] | None = None) -> float | None:
        """Return the seconds until every process is ready, or until `is_over`. None after WHOLE_S."""
        return time.monotonic() - since if poll_until_true(is_over or self.is_ready, WHOLE_S, POLL_S) else None

    def is_ready(self) -> bool:
        """Return whether every process reports healthy and ready."""
        try:
            found = self._kelvin.admin.request("GET", "/admin/v1/status")
        except InstallationFailed:
            return False
        return all(row["healthy"] and row["ready"] for row in found["processes"])

    def serves(self) -> bool:
        """Return whether the model has a ready replica that was not killed. The load must request it meanwhile."""
        try:
            return self.is_ready() and bool(self._replicas() - self._killed)
        except InstallationFailed:
            return False

    def _replicas(self) -> set[int]:
        versions = self._kelvin.model(self._model)["versions"]
        return {int(row["pid"]) for version in versions for row in version["replicas"] if row["state"] == "ready"}

    def _kill(self, module: str) -> None:
        os.kill(self._kelvin.pid_of(module), signal.SIGKILL)

    def _kill_runtime(self) -> None:
        pids = self._replicas() - self._killed
        if not pids:
            raise InstallationFailed("none is ready")
        self._killed.add(pid := min(pids))
        os.kill(pid, signal.SIGKILL)
