"""A whole activator in its own process over TLS, with a fake control plane and fake replicas."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from yarl import URL

from coldstart_bench.harness.installation import free_port
from kelvin.contracts.serving.control_messages import ReplicaRow
from kelvin.ipc.socket_directory import SocketDirectory, peer_pid
from tests.activator.control import KEY, MARKER, VERSION, FakeControl, limited, replica_row
from tests.activator.forked_activator import ForkedActivator
from tests.activator.replica import FakeReplica, Script, hello

_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}


@dataclass
class ReceivedResponse:
    """A whole response, as the client received it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        """The decoded body."""
        found: dict[str, object] = json.loads(self.body)
        return found

    @property
    def code(self) -> object:
        """The code of an OpenAI error."""
        error = self.json["error"]
        assert isinstance(error, dict)
        return error["code"]


@dataclass
class ActivatorWorld:
    """A running activator with its control plane, replicas and client."""

    data: Path
    port: int
    control: FakeControl
    process: ForkedActivator
    client: aiohttp.ClientSession
    tls: ssl.SSLContext
    environment: dict[str, str]
    program: str  # the module that is run
    listener: socket.socket | None = None  # the listening socket, if the test owns it
    replicas: list[FakeReplica] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The base URL."""
        return f"https://localhost:{self.port}"

    async def replica(
        self, name: str, script: Script = hello, *, is_published: bool = True, waits_until_read: bool = True, **row: Any
    ) -> FakeReplica:
        """Start a replica. If `is_published`, publish its row with these fields in the feed. With `waits_until_read`,
        the activator has read the row on return.
        """
        replica = FakeReplica(script)
        await replica.start(self.data / "run", name)
        self.replicas.append(replica)
        if is_published:
            self.control.publish(replica_row(name, **row))
        if is_published and waits_until_read:
            await self.settled()
        return replica

    async def publish(self, *replicas: ReplicaRow, **line: Any) -> None:
        """Publish a change in the feed. The activator has read it on return."""
        self.control.publish(*replicas, **line)
        await self.settled()

    async def limit(self, tenant: str = "default", **limits: Any) -> None:
        """Give the tenant these limits, and no others."""
        await self.publish(tenants=(limited(tenant, **limits),))

    async def settled(self) -> None:
        """Return once the activator has read the whole feed. A new model, published last, shows that."""
        marker = self.control.mark()
        async with asyncio.timeout(30):
            while (await self.get(f"/v1/models/{marker}", MARKER)).status != 200:
                await asyncio.sleep(0.005)

    async def get(self, path: str, key: str = KEY, **headers: str) -> ReceivedResponse:
        """Send a GET request."""
        return await self.request("GET", path, None, key, **headers)

    async def post(
        self, path: str = "/v1/chat/completions", body: object = None, key: str = KEY, **headers: str
    ) -> ReceivedResponse:
        """Send a POST request with a JSON body."""
        payload = body if isinstance(body, bytes) else json.dumps(CHAT if body is None else body).encode()
        return await self.request("POST", path, payload, key, **headers)

    async def request(
        self, method: str, path: str, payload: bytes | None, key: str, **headers: str
    ) -> ReceivedResponse:
        """Send a request. Return its whole response."""
        own = {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): value for name, value in headers.items()}
        url = URL(self.url + path, encoded=True)
        data = None if payload is None else io.BytesIO(payload)
        async with self.client.request(method, url, data=data, headers=own) as answer:
            return ReceivedResponse(
                answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()
            )

    async def raw(
        self, said: bytes = b"", *, source: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a TLS connection from an address of this machine, and write `said` on it."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.tls, server_hostname="localhost", local_addr=(source, 0)
        )
        writer.write(said)
        return reader, writer

    async def own(self, path: str) -> ReceivedResponse:
        """Send a GET request to the activator's own socket."""
        connector = aiohttp.UnixConnector(path=str(self.data / "run" / "activator.sock"))
        async with aiohttp.ClientSession(connector=connector) as own, own.get(f"http://activator{path}") as answer:
            return ReceivedResponse(answer.status, dict(answer.headers), await answer.read())

    async def page(self) -> str:
        """Return the activator's metrics page."""
        return (await self.own("/metrics")).body.decode()

    async def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each series of that name."""
        lines = re.findall(rf"^{name}{{(.*)}} (\S+)$", await self.page(), re.MULTILINE)
        return [(dict(_LABEL.findall(labels)), float(value)) for labels, value in lines]

    async def metric_value(self, name: str, **labels: str) -> float:
        """Return the sum of the series with these labels."""
        return sum(value for found, value in await self.series(name) if labels.items() <= found.items())

    async def wait_for_metric(self, name: str, value: float, **labels: str) -> None:
        """Wait until `metric_value` returns `value`."""
        async with asyncio.timeout(30):
            while await self.metric_value(name, **labels) != value:
                await asyncio.sleep(0.01)

    async def wait_for_queued(self, count: int) -> None:
        """Wait until so many requests wait for a slot."""
        await self.wait_for_metric("kelvin_requests_queued", count)

    async def restart(self, path: str = "/readyz") -> None:
        """Start another activator on the same data after the first has ended. Return when its socket answers `path`."""
        assert self.process.returncode is not None
        self.process = ForkedActivator(self.program, self.environment, self.data / "log", self.listener)
        await _until_ready(self.data, self.process, path)

    async def start_successor(self) -> ForkedActivator:
        """Start another activator on the same data and listener. Return the old one once the new one is ready."""
        old, self.process = (
            self.process,
            ForkedActivator(self.program, self.environment, self.data / "log", self.listener),
        )
        directory = SocketDirectory(self.data / "run")
        try:
            async with asyncio.timeout(60):
                while True:
                    assert self.process.returncode is None, "the activator ended"
                    with directory.connect("activator.sock") as connected:
                        if peer_pid(connected) == self.process.pid:
                            break
                    await asyncio.sleep(0.02)
        finally:
            directory.close()
        await _until_ready(self.data, self.process, "/readyz")
        return old

    async def terminate(self) -> int:
        """Send SIGTERM. Return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            return await self.process.wait()


def http(body: bytes, path: str = "/v1/chat/completions", key: str = KEY, extra: str = "") -> bytes:
    """Return the bytes of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{extra}\r\n".encode() + body


@asynccontextmanager
async def world(
    tmp_path: Path,
    *,
    control_up: bool = True,
    program: str = "activator",
    listener: socket.socket | None = None,
    **settings: object,
) -> AsyncIterator[ActivatorWorld]:
    """Yield a running activator. It must exit with 0 at the end, and must not have logged a defect."""
    data = tmp_path / "data"
    (data / "run").mkdir(parents=True)
    (data / "run").chmod(0o700)
    control = FakeControl()
    if control_up:
        await control.start(data / "run")
    given = {f"KELVIN_{name.upper()}": str(value) for name, value in settings.items()}
    environment = {**os.environ, "KELVIN_DATA": str(data), **given}
    process, port = await _started(program, data, environment, "/readyz" if control_up else "/healthz", listener)
    here: ActivatorWorld | None = None
    try:
        tls = ssl.create_default_context(cafile=str(data / "ca.pem"))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls, limit=0)) as client:
            here = ActivatorWorld(data, port, control, process, client, tls, environment, program, listener)
            yield here
            assert here.process.returncode is not None or await here.terminate() == 0
        said = (data / "log").read_text()
        assert '"unforeseen failure"' not in said, said
        assert "Traceback" not in said, said
    finally:
        for left in {process, process if here is None else here.process}:
            if left.returncode is None:
                left.kill()
                await left.wait()
        for replica in here.replicas if here is not None else ():
            await replica.stop()
        await control.stop()


async def _started(
    program: str, data: Path, environment: dict[str, str], path: str, listener: socket.socket | None
) -> tuple[ForkedActivator, int]:
    """Return a ready activator and its port. Try another port if another process took the first one."""
    while True:
        port = free_port() if listener is None else listener.getsockname()[1]
        environment["KELVIN_PORT"] = str(port)
        process = ForkedActivator(program, environment, data / "log", listener)
        try:
            await _until_ready(data, process, path)
        except BaseException as error:
            process.kill()
            await process.wait()
            log = data / "log"
            if isinstance(error, AssertionError) and log.exists() and "Address already in use" in log.read_text():
                log.unlink()
                continue
            raise
        return process, port


async def _until_ready(data: Path, process: ForkedActivator, path: str) -> None:
    connector = aiohttp.UnixConnector(path=str(data / "run" / "activator.sock"))
    async with asyncio.timeout(60), aiohttp.ClientSession(connector=connector) as own:
        while True:
            assert process.returncode is None, "the activator ended"
            try:
                async with own.get(f"http://activator{path}") as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(0.02)


__all__ = ["CHAT", "VERSION", "ActivatorWorld", "ReceivedResponse", "http", "world"]
