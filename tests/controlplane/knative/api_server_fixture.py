"""A client of the fake API server in `tests/cluster`, and a log of its watches."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest

from controlplane.clock import Clock
from controlplane.knative.apply.cluster import ApiFailure, Change, ClusterError, Deleted, Json, Ref, Synced, Upsert
from controlplane.knative.apply.kubernetes_client import KubernetesCluster, kubeconfig, open_cluster
from controlplane.knative.policy.knative_service import ClusterSpec, PodVersion, render_service
from tests.cluster.kube_api.api_server import ApiServer, serving

NAMESPACE = "kelvin-models"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """Yield an API server with a namespace for models."""
    with serving() as it:
        it.namespace(NAMESPACE)
        yield it


@asynccontextmanager
async def open_test_client(
    server: ApiServer, directory: Path, clock: Clock | None = None
) -> AsyncIterator[KubernetesCluster]:
    """Yield a client of the server, configured by a kubeconfig file."""
    async with open_cluster(kubeconfig(server.kubeconfig(directory / "config")), clock) as client:
        yield client


def rendered_service(version: str = "3f2a91c0b7de", *, streams: int = 4, most: int = 3) -> Json:
    """Return a version's Knative Service as the product renders it."""
    pod = PodVersion(
        tenant="acme", model="llama", version=version, weight_bytes=5 << 30, kv_bytes=1 << 30, max_streams=streams,
        max_scale=most,
    )  # fmt: skip
    image = "dev.local/kelvin-runtime@sha256:" + "0" * 64
    return render_service(pod, ClusterSpec(image=image, store_url="s3://store", namespace=NAMESPACE))


def config_map(name: str, value: str = "1") -> Json:
    about = {"name": name, "namespace": NAMESPACE, "labels": {"app.kubernetes.io/managed-by": "kelvin"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"value": value}}


async def api_failure(call: Awaitable[object]) -> ApiFailure:
    """Return the failure that the call raises."""
    with pytest.raises(ClusterError) as raised:
        await call
    return raised.value.api_failure


class WatchLog:
    """The changes of a watch, and the objects that result from them."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.objects: dict[Ref, Json] = {}

    @property
    def syncs(self) -> int:
        return sum(isinstance(each, Synced) for each in self.changes)

    @property
    def values(self) -> dict[str, str]:
        """The value of each config map, by name."""
        return {ref.name: each["data"]["value"] for ref, each in self.objects.items()}

    def record_change(self, change: Change) -> None:
        self.changes.append(change)
        match change:
            case Synced(objects):
                self.objects = {Ref.of(each): each for each in objects}
            case Upsert(obj):
                self.objects[Ref.of(obj)] = obj
            case Deleted(ref):
                self.objects.pop(ref, None)


@asynccontextmanager
async def watch_objects(
    client: KubernetesCluster, kind: str = "ConfigMap", labels: str = ""
) -> AsyncIterator[WatchLog]:
    """Watch objects of this kind until the block ends."""
    log = WatchLog()

    async def listen() -> None:
        async with aclosing(client.watch("v1", kind, labels=labels)) as changes:
            async for change in changes:
                log.record_change(change)

    task = asyncio.create_task(listen())
    try:
        yield log
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
