"""The whole control plane on its socket: in this process for speed, or as the program that the supervisor starts."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from controlplane.app import run
from controlplane.settings import Settings, load
from service.unix import SocketDirectory
from tests.controlplane import backends
from tests.controlplane.builders import key, registration, stats
from tests.controlplane.ground import ROOT
from tests.eventually import eventually

ADMIN = {"x-kelvin-principal": json.dumps({"key_id": "k", "tenant": "default", "scopes": ["admin", "operator"]})}


class Door:
    """HTTP to `control.sock`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status, and the JSON where there is any."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with self.session.request(method, f"http://control{path}", data=data, headers=headers) as answer:
            raw = await answer.read()
            return answer.status, json.loads(raw) if "json" in answer.content_type else raw.decode()

    async def admin(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """As an operator of the default tenant."""
        return await self.ask(method, f"/admin/v1{path}", body, ADMIN)


@asynccontextmanager
async def knocking(data: Path) -> AsyncIterator[Door]:
    """A client of whatever control plane runs over `data`."""
    with closing(SocketDirectory(data / "run")) as directory:
        connector = aiohttp.UnixConnector(path=directory.address("control.sock"))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Door(session)


def settings(data: Path, **more: str) -> Settings:
    """As the environment would give them."""
    return load({"KELVIN_DATA": str(data), **{f"KELVIN_{name.upper()}": value for name, value in more.items()}})


@asynccontextmanager
async def opened(data: Path, **more: str) -> AsyncIterator[Door]:
    """A control plane in this process, serving, over the test's database."""
    stop = asyncio.Event()
    if not isinstance(place := backends.place(data), Path):
        more["database"] = place.url
    serving = asyncio.create_task(run(settings(data, **more), stop))
    try:
        await eventually(lambda: serving.done() or (data / "run" / "control.sock").exists(), "control.sock")
        async with knocking(data) as door:
            yield door
    finally:
        stop.set()
        await serving
        (data / "run" / "control.sock").unlink()


@contextmanager
def program(data: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m controlplane`; killed when the block is left, if it still runs."""
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


async def push(door: Door, model: str = "m", letter: str = "a") -> None:
    body = msgspec.to_builtins(registration(model, letter))
    status, _ = await door.ask("POST", "/internal/v1/versions", body)
    assert status in (200, 201)


async def poke(door: Door, model: str = "m") -> None:
    status, _ = await door.ask("POST", "/internal/v1/stats", msgspec.json.encode(stats(key(model))))
    assert status == 204


async def shown(door: Door, model: str = "m") -> Any:
    status, found = await door.admin("GET", f"/models/{model}")
    assert status == 200
    return found


async def becomes(door: Door, state: str, model: str = "m") -> Any:
    """Ask until the model is in that state."""
    async with asyncio.timeout(20):
        while (found := await shown(door, model))["state"] != state:
            await asyncio.sleep(0.005)
    return found
