"""Run the whole control plane on its socket: in this process for speed, or as the supervised program."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from controlplane.app.app import run
from controlplane.app.settings import Settings, load
from kelvin.contracts.serving.control_messages import Feed
from kelvin.ipc.socket_directory import SocketDirectory
from tests.controlplane import database_backends
from tests.controlplane.builders import TENANT, key, registration, stats
from tests.controlplane.machine_fixture import ROOT
from tests.eventually import PATIENCE_S, eventually

ADMIN = {"x-kelvin-principal": json.dumps({"key_id": "k", "tenant": "default", "scopes": ["admin", "operator"]})}

OPERATOR = {"x-kelvin-principal": json.dumps({"key_id": "oper", "tenant": "default", "scopes": ["operator"]})}
ACME = {"x-kelvin-principal": json.dumps({"key_id": "acme-k", "tenant": "acme", "scopes": ["admin"]})}


class ControlPlaneClient:
    """An HTTP client of `control.sock`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request. Return the status, and the body: decoded if it is JSON, else as text."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with self.session.request(method, f"http://control{path}", data=data, headers=headers) as answer:
            raw = await answer.read()
            return answer.status, json.loads(raw) if "json" in answer.content_type else raw.decode()

    async def admin(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Call the admin API as an operator of the default tenant."""
        return await self.request(method, f"/admin/v1{path}", body, ADMIN)

    async def poll_until(self, path: str, holds: Callable[[Any], object]) -> Any:
        """GET a path of the admin API until `holds` accepts the answer, and return that."""
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.admin("GET", path))[0] != 200 or not holds(found[1]):
                await asyncio.sleep(0.005)
        return found[1]


@asynccontextmanager
async def connect_client(data: Path) -> AsyncIterator[ControlPlaneClient]:
    """Yield a client of the control plane that runs over `data`."""
    with closing(SocketDirectory(data / "run")) as directory:
        connector = aiohttp.UnixConnector(path=directory.address("control.sock"))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield ControlPlaneClient(session)


def settings(data: Path, **more: str) -> Settings:
    """Return settings as the environment would give them."""
    return load({"KELVIN_DATA": str(data), **{f"KELVIN_{name.upper()}": value for name, value in more.items()}})


@asynccontextmanager
async def running_control_plane(data: Path, **more: str) -> AsyncIterator[ControlPlaneClient]:
    """Run a control plane in this process, over the test's database. Yield a client of it."""
    stop = asyncio.Event()
    if not isinstance(place := database_backends.place(data), Path):
        more["database"] = place.url
    serving = asyncio.create_task(run(settings(data, **more), stop))
    try:
        await eventually(lambda: serving.done() or (data / "run" / "control.sock").exists(), "control.sock")
        async with connect_client(data) as client:
            yield client
    finally:
        stop.set()
        await serving
        (data / "run" / "control.sock").unlink()


@contextmanager
def control_plane_process(data: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m controlplane`. It is killed at the end of the block."""
    environment = {
        **os.environ,
        "KELVIN_DATA": str(data),
        **{f"KELVIN_{key.upper()}": value for key, value in more.items()},
    }
    with (data.parent / "controlplane.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "controlplane"], cwd=ROOT, env=environment, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


async def wait_ready(data: Path) -> None:
    """Wait until the control plane over `data` is ready."""
    await eventually(lambda: (data / "run" / "control.sock").exists())
    async with connect_client(data) as client:
        async with asyncio.timeout(60):
            while True:
                try:
                    if (await client.request("GET", "/readyz"))[0] == 200:
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.005)


class FeedReader:
    """Reads the lines of a feed, without the heartbeats that it sends on a slow machine."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def line(self) -> Feed:
        async with asyncio.timeout(30):
            while True:
                line = msgspec.json.decode(await self._content.readline(), type=Feed)
                if line != Feed(revision=line.revision):
                    return line


@asynccontextmanager
async def open_feed(client: ControlPlaneClient) -> AsyncIterator[FeedReader]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with client.session.get("http://control/internal/v1/feed", timeout=timeout) as answer:
        assert answer.status == 200
        assert answer.content_type == "application/x-ndjson"
        yield FeedReader(answer.content)


async def call_admin(
    client: ControlPlaneClient,
    headers: dict[str, str],
    method: str,
    path: str,
    body: object = None,
    *,
    status: int = 200,
) -> Any:
    got, found = await client.request(method, f"/admin/v1{path}", body, headers)
    assert got == status, found
    return found


async def push(client: ControlPlaneClient, model: str = "m", letter: str = "a", tenant: str = TENANT) -> None:
    body = msgspec.to_builtins(registration(model, letter, tenant=tenant))
    status, _ = await client.request("POST", "/internal/v1/versions", body)
    assert status in (200, 201)


async def report_request(client: ControlPlaneClient, model: str = "m") -> None:
    status, _ = await client.request("POST", "/internal/v1/stats", msgspec.json.encode(stats(key(model))))
    assert status == 204


async def model_status(client: ControlPlaneClient, model: str = "m") -> Any:
    status, found = await client.admin("GET", f"/models/{model}")
    assert status == 200
    return found


async def wait_for_state(client: ControlPlaneClient, state: str, model: str = "m") -> Any:
    """Wait until the model is in that state."""
    return await client.poll_until(f"/models/{model}", lambda found: found["state"] == state)
