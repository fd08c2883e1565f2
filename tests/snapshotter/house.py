"""A snapshotter and its fake control plane, served on real Unix sockets by a thread; clients are real HTTP clients."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from blobstore.factory import open_store
from blobstore.store import BlobStore
from blobstore.verifying import VerifyingStore
from contracts.control import Principal, Scope
from contracts.wire import encode
from service.client import ServiceClient
from service.run import serve_until
from service.unix import SocketDirectory
from snapshotter.app import CONTROL_SOCKET, SOCKET, open_app
from snapshotter.jobs import ControlPlaneJobs
from snapshotter.settings import SnapshotterSettings
from tests.snapshotter.control import FakeControlPlane

TENANT = "acme"
Wrap = Callable[[BlobStore], BlobStore]


def settings_for(data: Path, **more: int) -> SnapshotterSettings:
    """Chunks of two pages and packs of eight, so that a toy model has several of both."""
    defaults = {"chunk_bytes": 8192, "pack_bytes": 32768}
    return SnapshotterSettings(data=data, store_url=f"file://{data}/store", **(defaults | more))


def principal(tenant: str = TENANT, *scopes: Scope) -> dict[str, str]:
    """The header that the activator would set."""
    who = Principal(key_id="k1", tenant=tenant, scopes=scopes or (Scope.ADMIN,))
    return {"x-kelvin-principal": encode(who).decode()}


@dataclass
class House:
    """Where the processes are, and what they hold."""

    data: Path
    control: FakeControlPlane
    directory: SocketDirectory

    @property
    def store(self) -> Path:
        return self.data / "store"

    @contextmanager
    def client(self, tenant: str = TENANT, *scopes: Scope) -> Iterator[httpx.Client]:
        transport = httpx.HTTPTransport(uds=self.directory.address(SOCKET))
        headers = principal(tenant, *scopes)
        with httpx.Client(transport=transport, base_url="http://snapshotter", headers=headers, timeout=60) as client:
            yield client


@contextmanager
def open_house(settings: SnapshotterSettings, wrap: Wrap = lambda store: store) -> Iterator[House]:
    """Serve until the block is left; what the thread raised is raised here."""
    control = FakeControlPlane(settings.data / "store")
    with ExitStack() as stack:
        directory = SocketDirectory(settings.run)
        stack.callback(directory.close)
        listeners = directory.listen(SOCKET), directory.listen(CONTROL_SOCKET)
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        stop = asyncio.Event()
        failed: list[BaseException] = []

        async def serve() -> None:
            client = ServiceClient(directory, CONTROL_SOCKET, "the control plane")
            store = wrap(VerifyingStore(open_store(settings.store_url)))
            try:
                jobs = ControlPlaneJobs(client, 30, 30)
                async with open_app(settings, store, jobs) as app, asyncio.TaskGroup() as tasks:
                    tasks.create_task(serve_until(app, listeners[0], stop, drain_s=5))
                    tasks.create_task(serve_until(control.app(), listeners[1], stop, drain_s=5))
            finally:
                await client.close()

        def run() -> None:
            try:
                asyncio.set_event_loop(loop)
                loop.run_until_complete(serve())
                loop.run_until_complete(loop.shutdown_default_executor())
            except BaseException as error:
                failed.append(error)
                for listener in listeners:
                    listener.close()

        thread = threading.Thread(target=run, name="house")
        thread.start()
        try:
            yield House(settings.data, control, directory)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(30)
            for listener in listeners:
                listener.close()
            assert not thread.is_alive(), "the house did not stop"
        if failed:
            raise failed[0]
