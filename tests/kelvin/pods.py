"""Run `kelvin runtime`, `cache` or `engine` as processes: command line, port and child processes."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from coldstart_bench.harness.installation import free_port
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.supervisor.watchdog import PROBE_INTERVAL_S, PROBE_TIMEOUT_S
from tests.runtime.processes import DEADLINE_S, Installation, run_installation
from tests.unclean_exit import find_unclean_exit
from tests.weightcache.kit import TENANT, Version

LONG: Final = 16_384  # tokens: this many steps take seconds on any machine
PROMPT = {"prompt": [0, 7, 9, 11], "max_tokens": 12, "temperature": 0}


PROBED_S: Final = PROBE_INTERVAL_S + 2 * PROBE_TIMEOUT_S  # from a process's start until the watchdog has probed it


def was_probed(pid: int) -> bool:
    """Return whether the watchdog has probed this process. Until the first probe, a reply may take longer."""
    return time.time() - psutil.Process(pid).create_time() > PROBED_S


@contextmanager
def sealed_version(data: Path) -> Iterator[tuple[Installation, Version]]:
    """Yield an installation with a sealed version. Its context is long enough for completions of seconds."""
    from tests.runtime.versions import make_llama  # imported here because it imports torch

    with run_installation(data) as house:
        version = house.publish(make_llama(seed=5, max_position_embeddings=LONG, limits=Limits(400, LONG, 8)))
        standby = house.fork()
        standby.seal(version)
        standby.reap()
        yield house, version


@dataclass
class Pod:
    process: "subprocess.Popen[bytes]"
    port: int
    data: Path

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        return self._ask("GET", path, None, headers or {})

    def ask(self, body: dict[str, Any]) -> tuple[int, bytes]:
        return self._ask("POST", "/v1/completions", json.dumps(body).encode(), {"x-kelvin-request-id": "r1"})

    def open(self, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a completion request and return the connection and the response, with only its headers read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"x-kelvin-request-id": "r2"})
        return connection, connection.getresponse()

    def is_ready(self) -> bool | None:
        try:
            return self.get("/readyz")[0] == 200 or None
        except OSError:
            assert self.process.poll() is None, "it ended"
            return None

    def child(self, module: str) -> int:
        """Return the process id of the pod's child that runs `module`."""
        found = self.find_child(module)
        assert found is not None, f"{module} is not there"
        return found

    def find_child(self, module: str) -> int | None:
        """Return the process id of the pod's child that runs `module`, or None while it is down."""
        return child_of(self.process, module)

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def pod(
    house: Installation, version: str, data: Path, *options: str, tenant: str = TENANT, **more: str
) -> Iterator[Pod]:
    """Run a pod that serves this version. `kelvin` below describes how it ends."""
    with _running(house, data, (version, "--tenant", tenant, "--model", "m", *options), more) as each:
        yield each


@contextmanager
def standby(house: Installation, data: Path, *options: str, **more: str) -> Iterator[Pod]:
    """Run a standby pod on `cpu-1`. `kelvin` below describes how it ends."""
    with _running(house, data, ("--standby", "cpu-1", "--threads", "1", *options), more) as each:
        yield each


@contextmanager
def _running(house: Installation, data: Path, what: tuple[str, ...], more: dict[str, str]) -> Iterator[Pod]:
    port = free_port()
    words = ("runtime", *what, "--host", "127.0.0.1", "--data", str(data))
    settings = {"PORT": str(port), **{f"KELVIN_{name}": value for name, value in more.items()}}
    with kelvin(house, *words, settings=settings) as process:
        yield Pod(process, port, data)


@contextmanager
def kelvin(
    house: Installation, *words: str, settings: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a `kelvin` command over the installation's store and kill it at the end of the block. If it had exited with 0
    by then, its log must show no unclean exit."""
    env = os.environ | {
        "KELVIN_HOST_BYTES": str(16 << 20),
        "KELVIN_SLAB_BYTES": str(4 << 20),
        "KELVIN_NVME_BYTES": str(64 << 20),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **(settings or {}),
    }
    command = [sys.executable, "-m", "kelvin.cli.main", *words, "--store", (house.data / "store").as_uri()]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        status = process.poll()
        process.kill()  # its children exit when their lifeline closes
        _, lines = process.communicate(timeout=DEADLINE_S)
        if status == 0:
            left = find_unclean_exit((lines or b"").decode())
            assert left == [], "\n".join(left)


def child_of(process: "subprocess.Popen[bytes]", module: str) -> int | None:
    """Return the process id of the child that runs `module`, or None while it is down."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):  # the child may have exited meanwhile
            if module in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0"):
                return int(pid)
    return None
