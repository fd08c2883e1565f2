"""Tools of the attack tests: raw TLS connections, bystanders that keep sending requests, and a memory watch."""

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from coldstart_bench.harness.installation import Installation
from tests.e2e.https_client import Answer, ask

ROOT: Final = Path(__file__).parents[2]
SETTINGS: Final = {
    "KELVIN_HOST_BYTES": str(256 << 20),
    "KELVIN_SLAB_BYTES": str(16 << 20),
    "KELVIN_NVME_BYTES": str(256 << 20),
    "KELVIN_KV_BYTES": str(64 << 20),
    "KELVIN_CHUNK_BYTES": str(16 << 10),  # so that a tiny model has many
    "KELVIN_SCRUB_S": "0",
    "KELVIN_BREAKER_S": "1",  # a replica that an attack broke is tried again soon
}
MIB: Final = 1 << 20


def failure_text(code: int, out: str, err: str) -> str:
    """Return the output of a command that failed. Fails if it succeeded or printed a traceback."""
    assert code != 0, out
    said = out + err
    assert "Traceback" not in said, said
    return said


def metric(up: Installation, series: str) -> float:
    """Return the sum of the metric series whose names begin with `series`; 0 if there are none."""
    page = ask(up, "GET", "/admin/v1/metrics", up.data / "admin.key").raw.decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(series))


class Bystander:
    """Sends the same request again and again from its own thread, and records the answers, times and failures."""

    def __init__(self, ask: Callable[[], Answer], pause_s: float = 0.1) -> None:
        self._ask, self._pause_s = ask, pause_s
        self._stop = threading.Event()
        self._answered = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="bystander")
        self.answers: list[Answer] = []
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def wait_for(self, answers: int, limit_s: float = 60.0) -> None:
        """Wait for this many more answers."""
        with self._answered:
            wanted = len(self.seconds) + answers
            is_answered = self._answered.wait_for(lambda: len(self.seconds) >= wanted, limit_s)
        assert is_answered, f"the bystander waits; so far {self}"

    def __repr__(self) -> str:
        longest = max(self.seconds, default=0.0)
        return f"<Bystander {len(self.seconds)} answers, longest {longest:.2f} s, failures {self.failures[:3]}>"

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                answer = self._ask()
                self.answers.append(answer)
                if answer.status != 200 or answer.error:
                    self.failures.append(f"{answer.status} {answer.raw[:200].decode(errors='replace')}")
            except BaseException as error:  # any error at all means that the attack disturbed the bystander
                self.failures.append(repr(error))
            with self._answered:
                self.seconds.append(time.monotonic() - began)
                self._answered.notify_all()
            self._stop.wait(self._pause_s)


def percentile_95(seconds: Sequence[float]) -> float:
    """Return the 95th percentile; between two values, the larger one."""
    return sorted(seconds)[min(len(seconds) - 1, int(0.95 * len(seconds)))]


def anonymous_bytes(pid: int) -> int:
    """Return the private memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


@dataclass
class MemoryWatch:
    """Measures the memory of all child processes of an installation while its block runs."""

    pid: int
    before_bytes: int = 0
    peak_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.before_bytes = self._look()
        self._thread = threading.Thread(target=self._run, name="memory watch")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    @property
    def growth_bytes(self) -> int:
        """Peak memory minus the memory before the block."""
        return self.peak_bytes - self.before_bytes

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._look())

    def _look(self) -> int:
        found = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children(recursive=True):
                found += anonymous_bytes(process.pid)
        return found


class RawTlsConnection:
    """A TLS connection that sends raw bytes and reads one response after another."""

    def __init__(self, up: Installation) -> None:
        context = ssl.create_default_context(cafile=str(up.data / "ca.pem"))
        plain = socket.create_connection(("localhost", up.port), timeout=60)
        self._socket = context.wrap_socket(plain, server_hostname="localhost")
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._socket.close()

    def send(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def answer(self) -> Answer | None:
        """Return the next response; None if the connection ends before its status line."""
        try:
            line = self._file.readline()
        except (ssl.SSLError, ConnectionError):
            return None
        if not line:
            return None
        status, headers = int(line.split()[1]), {}
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            headers[name.decode().lower()] = value.decode().strip()
        body = self._file.read(int(headers["content-length"])) if "content-length" in headers else b""
        return Answer(status, headers, body)

    def more(self, limit_s: float = 1.0) -> Answer | None:
        """Return one more response, which no request should have caused; None if none arrives in time."""
        self._socket.settimeout(limit_s)
        try:
            return self.answer()
        except TimeoutError:
            return None


def request(up: Installation, body: object, *headers: str, key: Path | None = None, version: str = "HTTP/1.1") -> bytes:
    """Return a completion request as bytes, with additional header lines."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    secret = (key or up.data / "default.key").read_text().strip()
    lines = [f"POST /v1/completions {version}", "Host: localhost", f"Authorization: Bearer {secret}",
             "Content-Type: application/json", *headers]  # fmt: skip
    if not any(line.lower().startswith(("transfer-encoding:", "content-length:")) for line in headers):
        lines.append(f"Content-Length: {len(raw)}")
    return "\r\n".join([*lines, "", ""]).encode() + raw
