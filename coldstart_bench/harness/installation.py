"""Run an installation as a user does: `kelvin up`, its commands, and calls over kept-alive TLS.

Benches and tests begin with `running_installation`. `find_unfinished_writes`, `find_stray_sockets` and `find_leftovers`
find files and processes that an installation must not leave behind.
"""

import contextlib
import http.client
import json
import os
import secrets
import select
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

from coldstart_bench.harness.polling import poll_until_true
from coldstart_bench.harness.process_stats import IdleDetector, child_commands, cpu_ticks, runtimes_below
from coldstart_bench.report.bench_report import BenchFailed
from controlplane.ledger.policy.month import month_after, month_of
from kelvin.process.python_command import python_command, runs_module

START_S: Final = 300.0  # more than `kelvin up` itself gives its processes (KELVIN_READY_S)
END_S: Final = 120.0
HOUR_S: Final = 3600.0
PUSH_S: Final = 3600.0
ATTEMPTS: Final = 3
PORT_TAKEN_TEXT: Final = "Address already in use"
FIRST_PORT: Final = 15_000
_UNFINISHED: Final = {
    "a push": "staging/*/*/declared.json",
    "a draft": "store/*/drafts/[0-9a-f]*",
    "an object that was being written": "store/.staging/*",
    "a chunk that was being written": "cache/.staging/*",
}


class InstallationFailed(BenchFailed):
    """`kelvin up` did not start, or refused a call. The text has its output."""


def free_port() -> int:
    """Return a free port of the loopback interface, below the kernel's ephemeral ports if they begin above FIRST_PORT.
    No outgoing connection can then take the port while its process is restarted.
    """
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", FIRST_PORT + secrets.randbelow(below - FIRST_PORT) if below > FIRST_PORT else 0))
            return int(probe.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """Return this many different free ports, each from `free_port`."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[free_port()] = None
    return list(found)


@contextlib.contextmanager
def translate_call_errors(connection: http.client.HTTPConnection, what: str) -> Iterator[None]:
    """Raise InstallationFailed for an error of the connection, and close it: after a failed call it can't be used."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise InstallationFailed(f"{what}: {type(error).__name__}: {error}") from error


def run_command(
    data: Path, *words: str, settings: Mapping[str, str] | None = None, limit_s: float | None = None
) -> tuple[int, str, str]:
    """Run `kelvin WORDS --data DATA` to its end. Return (exit code, stdout, stderr). Raises InstallationFailed if it
    takes longer than `limit_s`.
    """
    command = python_command("kelvin.cli.main", *words, "--data", str(data))
    environment = {**os.environ, **(settings or {})}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise InstallationFailed(f"kelvin {' '.join(words)} did not end within {error.timeout:g} s") from error
    return done.returncode, done.stdout, done.stderr


class HttpsClient:
    """One kept-alive TLS connection to the activator."""

    def __init__(self, port: int, ca: Path, key: Path) -> None:
        context = ssl.create_default_context(cafile=str(ca))
        self._connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=600)
        self._headers = {"authorization": f"Bearer {key.read_text().strip()}", "content-type": "application/json"}

    def request(self, method: str, path: str, body: object | None = None) -> Any:
        """Return the decoded response. Raises InstallationFailed with the text of an error."""
        raw = self._read(method, path, None if body is None else json.dumps(body))
        return json.loads(raw) if raw else None

    def text(self, path: str) -> str:
        """Return the body of a GET as text. Raises InstallationFailed."""
        return self._read("GET", path, None).decode()

    def _read(self, method: str, path: str, payload: str | None) -> bytes:
        with translate_call_errors(self._connection, f"{method} {path}"):
            if self._is_closed():
                self._connection.close()
            try:
                answer = self._ask(method, path, payload)
            except (ssl.SSLError, ConnectionError):
                if method == "POST":  # it may have arrived: a repeat might be executed and billed twice
                    raise
                self._connection.close()
                answer = self._ask(method, path, payload)
            raw = answer.read()
        if answer.status >= 400:
            raise InstallationFailed(f"{method} {path}: {answer.status} {raw.decode(errors='replace')}")
        return raw

    def _is_closed(self) -> bool:
        """Return whether the activator closed the idle connection. Its socket is then readable."""
        idle = self._connection.sock
        return idle is not None and bool(select.select([idle], [], [], 0)[0])

    def _ask(self, method: str, path: str, payload: str | None) -> http.client.HTTPResponse:
        self._connection.request(method, path, payload, self._headers)
        return self._connection.getresponse()

    def complete(self, model: str, prompt: str, max_tokens: int) -> str:
        """Return the text of a completion at temperature 0. Raises InstallationFailed with the text of an error."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return str(self.request("POST", "/v1/completions", body)["choices"][0]["text"])

    def first_token(self, model: str, prompt: str) -> float:
        """Return the seconds from the request to the first event with text. Reads the stream to its end. Raises
        InstallationFailed.
        """
        return self.start(model, prompt)[0]

    def start(self, model: str, prompt: str) -> tuple[float, str]:
        """Return (seconds to the first token, request id), as `first_token` does."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        self.request("GET", "/v1/models")  # connect first: the handshake is not part of a cold start
        first: float | None = None
        with translate_call_errors(self._connection, model):
            began = time.perf_counter()
            answer = self._ask("POST", "/v1/completions", json.dumps(body))
            for line in answer:
                if first is None and line.startswith(b"data: {"):
                    first = time.perf_counter() - began
                if line.startswith(b"event: error") or (first is None and answer.status >= 400):
                    reason = (line + answer.read()).decode(errors="replace")
                    raise InstallationFailed(f"{model}: {answer.status} {reason}")
        if first is None:
            raise InstallationFailed(f"{model}: the stream held no token")
        return first, answer.headers["x-request-id"]

    def close(self) -> None:
        """Close the TLS connection."""
        self._connection.close()


class Installation:
    """A running `kelvin up`. `client` calls with the tenant's key, `admin` with the administrator's."""

    def __init__(self, data: Path, port: int, pid: int) -> None:
        self.data, self.port, self.pid = data, port, pid
        self.began_s = time.time()
        self.client = HttpsClient(port, data / "ca.pem", data / "default.key")
        self.admin = HttpsClient(port, data / "ca.pem", data / "admin.key")

    def close(self) -> None:
        """Close the connections. An activator that ends would wait for idle ones."""
        self.client.close()
        self.admin.close()

    @property
    def key(self) -> str:
        """The API key of the default tenant."""
        return (self.data / "default.key").read_text().strip()

    def push(self, directory: Path, name: str, *, replicas: int | None = None) -> str:
        """Push with the command line and return the version. `replicas` sets the model's maximum scale."""
        code, out, err = run_command(self.data, "push", str(directory), "--name", name, limit_s=PUSH_S)
        if code != 0:
            raise InstallationFailed(f"push {name}: {err.strip()}")
        if replicas is not None:
            self.admin.request("PUT", f"/admin/v1/models/{name}/scale", {"max": replicas})
        return out.strip().splitlines()[-1]

    def cache(self) -> Any:
        """Return the admin API's report about the weight cache."""
        return self.admin.request("GET", "/admin/v1/cache")

    def model(self, name: str) -> Any:
        """Return the admin API's report about a model."""
        return self.admin.request("GET", f"/admin/v1/models/{name}")

    def bills(self, since_s: float) -> list[Any]:
        """Return the tenant's bills of all months from `since_s` (Unix time) until now, with an hour of margin at both
        ends. The installation's clock may be stepped, and a request belongs to the month of its end.
        """
        last = month_of(int(time.time() + HOUR_S) * 1_000_000)
        months = [month_of(int(since_s - HOUR_S) * 1_000_000)]
        while months[-1] < last:
            months.append(month_after(months[-1]))
        return [self.admin.request("GET", f"/admin/v1/billing/report?month={month}") for month in months]

    def scale_to_zero(self, name: str) -> None:
        """Stop a model. Wait until none of its replicas runs and a standby is parked again."""
        self.admin.request("POST", f"/admin/v1/models/{name}/stop")
        self.wait(lambda: self._is_at_zero(name), f"{name} is at zero")
        self.wait(
            lambda: self.admin.request("GET", "/admin/v1/status")["device"]["standbys"] > 0, "a standby is parked"
        )

    def _is_at_zero(self, name: str) -> bool:
        """Return whether no version of the model runs. The model's state covers only `prod`."""
        found = self.model(name)
        return found["state"] == "zero" and not any(version["replicas"] for version in found["versions"])

    def wait_idle(self) -> None:
        """Wait until parked standbys are idle, so that a start is measured from rest."""
        idle_detector = IdleDetector()
        self.wait(
            lambda: idle_detector.is_idle(cpu_ticks(runtimes_below(self.pid)), time.monotonic()),
            "the standbys are at rest",
        )

    def empty_tier(self, tier: str) -> None:
        """Scale every model to zero, and empty a tier of the weight cache."""
        for model in self.admin.request("GET", "/admin/v1/models")["models"]:
            self.scale_to_zero(model["model"])
        refusal = ""

        def is_empty() -> bool:
            nonlocal refusal
            try:
                self.admin.request("POST", "/admin/v1/cache/evict", {"tier": tier})
            except InstallationFailed as failed:  # an ending process may still hold a lease
                refusal = str(failed)
                return False
            return True

        try:
            self.wait(is_empty, f"the tier '{tier}' is empty")
        except InstallationFailed as failed:
            raise InstallationFailed(f"{failed}: {refusal}") from failed

    def pid_of(self, module: str) -> int:
        """Return the supervisor's child that runs `python -m MODULE`. Raises InstallationFailed if there is none."""
        for pid, words in sorted(child_commands(self.pid).items()):
            if runs_module(words, module):
                return pid
        raise InstallationFailed(f"no {module} runs")

    def nvme_files(self) -> Sequence[Path]:
        """Return every file of the NVMe tier: chunks and the agent's own files."""
        return [path for path in (self.data / "cache").rglob("*") if path.is_file()]

    def store_files(self) -> Sequence[Path]:
        """Return every object of a store in the data directory."""
        return [path for path in (self.data / "store").rglob("*") if path.is_file()]

    def wait(self, condition: Callable[[], bool], description: str, limit_s: float = 60.0) -> None:
        """Wait until `condition()`. Raises InstallationFailed with `description` after `limit_s`."""
        if not poll_until_true(condition, limit_s):
            raise InstallationFailed(f"after {limit_s:g} s it is still not true that {description}")


class KelvinUpProcess:
    """A `kelvin up` process, ready or not. Leaving the block ends it."""

    def __init__(
        self,
        data: Path,
        port: int,
        settings: Mapping[str, str] | None = None,
        *,
        options: Sequence[str] = (),
        program: str = "kelvin.cli.main",
        prefix: Sequence[str] = (),
        errors: Path | None = None,
    ) -> None:
        """`program` is the module to run, and `prefix` a command that runs it. Standard error is appended to the file
        `errors`, or to a temporary file. `error_output` reads it.
        """
        words = [*prefix, *python_command(program, "up", "--data", str(data), "--port", str(port), *options)]
        # Not a pipe: it would not be read, and a full pipe blocks the writer.
        self._errors: IO[bytes] = tempfile.TemporaryFile() if errors is None else errors.open("ab+")  # noqa: SIM115
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=self._errors, text=True, env={**os.environ, **(settings or {})}
        )
        self.pid = self._process.pid

    def __repr__(self) -> str:
        return f"<KelvinUpProcess {self._process}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready_line(self) -> str:
        """Wait for the ready line and return it. Empty if the process ends before. Raises InstallationFailed with its
        standard error after START_S.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_S)[0]:
            raise InstallationFailed(f"kelvin up is not ready after {START_S:g} s: {self.error_output()}")
        return self._process.stdout.readline()

    def error_output(self) -> str:
        """Return its standard error so far."""
        file = self._errors.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")  # pread keeps the writer's offset

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is alive."""
        self._process.send_signal(number)

    def wait_exit(self) -> int:
        """Wait until it ends by itself and return its exit status. Raises InstallationFailed after END_S."""
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired as error:
            raise InstallationFailed(f"kelvin up did not end within {error.timeout:g} s") from error

    def end(self) -> None:
        """Send SIGTERM and wait. Kill it after END_S."""
        end(self._process)

    def close(self) -> None:
        """End it and close its files."""
        self.end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def running_installation(
    data: Path,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    options: Sequence[str] = (),
    program: str = "kelvin.cli.main",
) -> Iterator[Installation]:
    """Run `kelvin up` on `data` until the block ends, and wait for its end. `program` is the module to run. Raises
    InstallationFailed with its standard error if it does not become ready.
    """
    for attempt in range(ATTEMPTS):
        chosen = port or free_port()
        with KelvinUpProcess(data, chosen, settings, options=options, program=program) as up:
            if "ready" not in (line := up.ready_line()):
                up.end()
                if port is None and PORT_TAKEN_TEXT in up.error_output() and attempt + 1 < ATTEMPTS:
                    continue  # another process took the port after our check
                raise InstallationFailed(f"kelvin up: {line}{up.error_output()}")
            installation = Installation(data, chosen, up.pid)
            try:
                yield installation
            finally:
                installation.close()
            return


def end(process: subprocess.Popen[Any]) -> None:
    """Send SIGTERM to a process and wait. Kill it after END_S."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def find_unfinished_writes(data: Path) -> list[str]:
    """Return leftover drafts and staged files, provided that no push and no admission runs now."""
    return [f"{what} is left: {path.name}" for what, place in _UNFINISHED.items() for path in data.glob(place)]


def find_stray_sockets(data: Path) -> list[str]:
    """Return sockets whose runtimes have ended."""
    living = {page.name.partition(".")[2] for page in (data / "run" / "meters").glob("[0-9]*")}
    names = {path.name.removeprefix("rt-").removesuffix(".sock") for path in (data / "run").glob("rt-*.sock")}
    return [f"the socket of a dead runtime is left: {name}" for name in sorted(names - living)]


def find_leftovers(data: Path) -> list[str]:
    """Return what an ended `kelvin up` has left: processes, meter pages, unshipped records."""
    found = [f"process {pid} is left: {name}" for pid, name in _processes_of(data)]
    found += [f"a meter page is left: {page.name}" for page in (data / "run" / "meters").glob("[0-9]*")]
    found += [f"records are left: {path.name}" for path in (data / "spool").glob("[!.]*/*") if path.stat().st_size]
    return found


def _processes_of(data: Path) -> list[tuple[int, str]]:
    """Return (pid, name) of living processes, no zombies, that were started with the data directory. See proc(5)."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"KELVIN_DATA={data}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append((int(place.name), (place / "comm").read_text().strip()))
    return found
