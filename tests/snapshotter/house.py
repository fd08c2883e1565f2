"""A snapshotter and its fake control plane, served on real Unix sockets by a thread. Clients are real HTTP clients."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from kelvin.blobstore.blob_store import BlobStore
from kelvin.blobstore.store_factory import open_store
from kelvin.blobstore.verifying_store import VerifyingStore
from kelvin.contracts.artifacts.push_api import CommitRequest, Missing, MissingRequest, Plan
from kelvin.contracts.serving.control_messages import Principal, Scope
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.service_lifecycle import serve_until
from snapshotter.app.app import CONTROL_SOCKET, SOCKET, open_app
from snapshotter.app.settings import SnapshotterSettings
from snapshotter.intake.policy.layout import assemble
from snapshotter.push.gate_jobs import GateJobs, StandaloneEngine
from tests.loop_thread import running_loop_thread
from tests.snapshotter.control import FakeControlPlane
from tests.snapshotter.models import Model
from tests.snapshotter.sender import TENANT as TENANT
from tests.snapshotter.sender import digests_of
from tests.snapshotter.unix import unix_transport

Wrap = Callable[[BlobStore], BlobStore]


def settings_for(data: Path, **more: int) -> SnapshotterSettings:
    """Return settings with chunks of two pages and packs of eight, so that a toy model has several of both."""
    defaults = {"chunk_bytes": 8192, "pack_bytes": 32768}
    settings = SnapshotterSettings(data=data, store_url=f"file://{data}/store")
    return replace(settings, **(defaults | more))  # type: ignore[arg-type]


def principal_of(tenant: str = TENANT, *scopes: Scope) -> dict[str, str]:
    """Return the header that the activator would set."""
    caller = Principal(key_id="k1", tenant=tenant, scopes=scopes or (Scope.ADMIN,))
    return {"x-kelvin-principal": encode(caller).decode()}


@dataclass
class House:
    """A running snapshotter: its data directory, its sockets, and its fake control plane."""

    data: Path
    control: FakeControlPlane
    directory: SocketDirectory

    @property
    def store(self) -> Path:
        return self.data / "store"

    @contextmanager
    def client(self, tenant: str = TENANT, *scopes: Scope) -> Iterator[httpx.Client]:
        transport = unix_transport(self.directory.address(SOCKET))
        headers = principal_of(tenant, *scopes)
        with httpx.Client(transport=transport, base_url="http://snapshotter", headers=headers, timeout=60) as client:
            yield client


@contextmanager
def serve_app(app: FastAPI, directory: SocketDirectory, name: str) -> Iterator[None]:
    """Serve one application on one socket until the block ends."""
    with (
        directory.listen(name) as listener,
        running_loop_thread(lambda stop: serve_until(app, listener, stop, drain_s=5)),
    ):
        yield


@contextmanager
def open_house(settings: SnapshotterSettings, wrap: Wrap = lambda store: store) -> Iterator[House]:
    """Serve a snapshotter and a control plane until the block ends. `wrap` wraps the snapshotter's store."""
    control = FakeControlPlane(settings.data / "store")
    with ExitStack() as stack:
        directory = SocketDirectory(settings.run)
        stack.callback(directory.close)
        stack.enter_context(serve_app(control.app(), directory, CONTROL_SOCKET))
        listener = stack.enter_context(directory.listen(SOCKET))

        async def serve(stop: asyncio.Event) -> None:
            client = ServiceClient(directory, CONTROL_SOCKET, "the control plane")
            store = wrap(VerifyingStore(open_store(settings.store_url)))
            try:
                judge = None if settings.engine is None else StandaloneEngine(settings.engine)
                async with open_app(settings, store, GateJobs(client, 30, 30, judge)) as app:
                    await serve_until(app, listener, stop, drain_s=5)
            finally:
                await client.close()

        with running_loop_thread(serve):
            yield House(settings.data, control, directory)


def post(client: httpx.Client, path: str, body: object) -> httpx.Response:
    return client.post(f"/push/v1{path}", content=encode(body))


def make_plan(client: httpx.Client, model: Model | None = None) -> Plan:
    answer = post(client, "/plans", (model or Model()).request())
    assert answer.status_code == 200, answer.text
    return decode(answer.content, Plan)


def problem(answer: httpx.Response) -> tuple[int, str, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    return answer.status_code, body["code"], body["detail"]


def announce_digests(client: httpx.Client, plan: Plan, digests: tuple[str, ...]) -> Missing:
    answer = post(client, f"/plans/{plan.plan_id}/missing", MissingRequest(digests=digests))
    assert answer.status_code == 200, answer.text
    return decode(answer.content, Missing)


def push_whole(client: httpx.Client, plan: Plan, files: dict[str, bytes] | None = None) -> dict[str, Any]:
    files = Model().files() if files is None else files
    digests = digests_of(plan, files)
    missing = announce_digests(client, plan, digests)
    chunks = dict(zip(digests, plan.chunks, strict=True))
    for digest in missing.digests:
        data = assemble(chunks[digest], files)
        assert client.put(f"/push/v1/plans/{missing.plan_id}/chunks/{digest}", content=data).status_code == 204
    while True:
        committed = post(client, f"/plans/{missing.plan_id}/commit", CommitRequest(digests=digests))
        if committed.status_code != 202:
            assert committed.status_code == 200, committed.text
            found: dict[str, Any] = committed.json()
            return found
