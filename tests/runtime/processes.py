"""A zygote and a cache agent as real processes in their own data directory, and the standbys that they fork."""

import asyncio
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.accounting.meter_format import Meter, decode_meter
from kelvin.contracts.artifacts.object_keys import attestation_key
from kelvin.contracts.artifacts.runtime_control import (
    BindRequest,
    BindResponse,
    RuntimeReport,
    SealAttestation,
    SealJob,
)
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.stream_frames import Frame, FrameDecoder
from kelvin.contracts.wire import encode
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from tests.weightcache.kit import TENANT, Version, publish

T = TypeVar("T")

DEADLINE_S: Final = 120.0
KV_BYTES: Final = 4 << 20  # per replica
_PR_SET_CHILD_SUBREAPER: Final = 36


_installations = 0


def _count_installations(change: int) -> None:
    """While any installation exists, be the subreaper, like the supervisor, so that orphans become our children."""
    global _installations
    _installations += change
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(_installations > 0), 0, 0, 0) == 0


def poll_until(wish: str, condition: Callable[[], T | None]) -> T:
    """Return the first result of `condition` that is not None, within DEADLINE_S. Pauses grow to save CPU time."""
    deadline, pause_s = time.monotonic() + DEADLINE_S, 0.005
    while time.monotonic() < deadline:
        if (found := condition()) is not None:
            return found
        select.select([], [], [], pause_s)
        pause_s = min(1.25 * pause_s, 0.1)
    raise AssertionError(f"never came true: {wish}")


@dataclass
class Standby:
    """A process that the zygote forked, to be reaped by the test."""

    installation: "Installation"
    runtime_id: str
    pid: int
    pidfd: int

    def call(self, method: str, path: str, kind: type[T], body: object | None = None) -> T:
        """Call a control route."""
        return self._run(lambda client: client.call(method, path, kind, body=body, timeout_s=DEADLINE_S))

    def report(self) -> RuntimeReport:
        return self.call("GET", "/control/state", RuntimeReport)

    def bind(self, version: Version, threads: int = 1) -> BindResponse:
        return self.call("POST", "/control/bind", BindResponse, bind_of(version, threads))

    def sleep(self) -> None:
        """Put it to sleep, once it has no running request."""
        poll_until("it sleeps", lambda: _try(lambda: (self.call("POST", "/control/sleep", type(None)),)))

    def drop(self) -> None:
        self.call("POST", "/control/drop", type(None))

    def wake(self, version: Version, threads: int = 1) -> BindResponse:
        return self.call("POST", "/control/wake", BindResponse, bind_of(version, threads))

    def seal(self, version: Version) -> SealAttestation:
        """Seal the version, and put the attestation into the store."""
        job = SealJob(tenant=TENANT, version=version.id)
        attestation = self.call("POST", "/control/seal", SealAttestation, job)
        key = attestation_key(TENANT, version.id, attestation.fingerprint)
        asyncio.run(self.installation.store.put_if_absent(key, encode(attestation)))
        return attestation

    def answer(self, body: Mapping[str, Any], request_id: str = "r1") -> list[Frame]:
        """Return all frames of a completion."""

        async def ask(client: ServiceClient) -> list[Frame]:
            async with self.request(client, body, request_id) as answer:
                decoder = FrameDecoder()
                frames = decoder.feed(await answer.read())
                assert answer.status == 200
                assert decoder.is_clean
                return frames

        return self._run(ask)

    @staticmethod
    def request(client: ServiceClient, body: Mapping[str, Any], request_id: str) -> Any:
        """Open a completion, to be read as it arrives."""
        headers = {"x-kelvin-request-id": request_id, "x-kelvin-key-id": "k1"}
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        return client.session.post("http://rt/v1/completions", data=json.dumps(body), headers=headers, timeout=timeout)

    def meter(self) -> Meter:
        """Return its meter page, also after its death."""
        path = self.installation.data / "run" / "meters" / f"{self.pid}.{self.runtime_id}"
        return decode_meter(path.read_bytes())

    def status(self) -> dict[str, str]:
        """Return `/proc/PID/status`."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    def fds(self) -> dict[int, str]:
        """Return its descriptors and their targets."""
        found: dict[int, str] = {}
        for each in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found[int(each.name)] = os.readlink(each)
        return found

    def kill(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Return its exit status like Popen."""
        assert select.select([self.pidfd], [], [], DEADLINE_S)[0], f"{self.runtime_id} lives on"
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.installation.standbys.remove(self)
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        self.kill(signal.SIGKILL)
        self.reap()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ServiceClient]:
        """A client of its socket."""
        client = ServiceClient(self.installation.directory, f"rt-{self.runtime_id}.sock", "the runtime")
        try:
            yield client
        finally:
            await client.close()

    def _run(self, work: Callable[[ServiceClient], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with self.client() as client:
                return await work(client)

        return asyncio.run(run())


def bind_of(version: Version, threads: int = 1) -> BindRequest:
    """Return the control plane's bind request."""
    return BindRequest(
        tenant=TENANT, model="m", version=version.id, device_class="cpu-2", threads=threads, kv_bytes=KV_BYTES
    )  # fmt: skip


@dataclass
class Installation:
    """A data directory with its processes."""

    data: Path
    directory: SocketDirectory
    store: FileStore
    zygote: "subprocess.Popen[bytes]"
    lifeline: int
    standbys: list[Standby] = field(default_factory=list)
    _last: int = 0

    def ask_zygote(self, message: object) -> tuple[dict[str, Any], list[int]]:
        """Send one message and receive one answer with descriptors."""
        with self.directory.connect("zygote.sock", socket.SOCK_SEQPACKET, DEADLINE_S) as sock:
            sock.send(message if isinstance(message, bytes) else json.dumps(message).encode())
            raw, fds, _, _ = socket.recv_fds(sock, 4096, 4)
        return json.loads(raw), fds

    def fork(self) -> Standby:
        """Fork a standby and wait until it is parked."""
        self._last += 1
        runtime_id = f"t{self._last}"
        reply, (pidfd,) = self.ask_zygote({"op": "fork", "runtime_id": runtime_id})
        standby = Standby(self, runtime_id, reply["pid"], pidfd)
        self.standbys.append(standby)
        poll_until("it parks", lambda: _try(standby.report))
        return standby

    def cut_lifeline(self) -> None:
        """Close the lifeline, as if the supervisor had died."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def publish(self, version: Version) -> Version:
        asyncio.run(publish(self.store, version))
        return version


def _try(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except (Refused, OSError):
        return None


@contextmanager
def run_installation(data: Path, *, agent: bool = True, host_bytes: int = 16 << 20) -> Iterator[Installation]:
    """Run an installation. All its processes are killed and reaped afterwards."""
    data.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    env = os.environ | {
        "KELVIN_DATA": str(data),
        "KELVIN_LIFELINE_FD": str(reader),
        "KELVIN_HOST_BYTES": str(host_bytes),
        "KELVIN_SLAB_BYTES": str(host_bytes // 4),
        "KELVIN_NVME_BYTES": str(4 * host_bytes),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    directory = SocketDirectory(data / "run")
    started: list[subprocess.Popen[bytes]] = []
    _count_installations(1)
    with (data / "log").open("ab") as log:

        def start(module: str) -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-m", module]
            started.append(subprocess.Popen(command, env=env, stderr=log, stdin=subprocess.DEVNULL, pass_fds=[reader]))
            return started[-1]

        zygote = start("runtime.app.zygote")
        if agent:
            start("weightcache")
        os.close(reader)
        each = Installation(data, directory, FileStore(data / "store"), zygote, writer)
        try:
            poll_until("the zygote is up", lambda: _try(lambda: each.ask_zygote({"op": "ping"})))
            if agent:
                poll_until("the agent is up", lambda: _try(lambda: _connect(directory)))
            yield each
        except BaseException:
            sys.stderr.write((data / "log").read_text()[-8000:])
            raise
        finally:
            each.cut_lifeline()
            for standby in list(each.standbys):
                standby.end()
            for process in started:
                process.kill()
                process.wait(DEADLINE_S)
            directory.close()
            _count_installations(-1)


def _connect(directory: SocketDirectory) -> bool:
    directory.connect("lease.sock", socket.SOCK_SEQPACKET).close()
    return True
