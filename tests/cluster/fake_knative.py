"""A control plane as a real process, and a cluster on which the test plays Knative and the kubelet."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from controlplane.knative.policy.knative_service import service_name
from controlplane.knative.policy.namespace_requirements import (
    ENFORCE,
    RESTRICTED,
    NamespaceRequirements,
    render_namespace,
)
from controlplane.knative.policy.object_labels import PART_OF
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.wire import encode
from tests.cluster.kube_api.api_server import ApiServer
from tests.cluster.kube_api.status_answers import Json
from tests.controlplane.builders import digest, registration
from tests.controlplane.control_plane_server import (
    ControlPlaneClient,
    FeedReader,
    connect_client,
    control_plane_process,
)
from tests.eventually import eventually

SERVING: Final = "serving.knative.dev/v1"
SLICES: Final = "discovery.k8s.io/v1"
NAMESPACE: Final = "kelvin-default"
IMAGE: Final = "registry.example/kelvin@sha256:" + "0" * 64
PARTS: Final = ("nodeselector", "tolerations", "priorityclassname", "volumes-hostpath")
FEATURES: Final = tuple(f"kubernetes.podspec-{part}" for part in PARTS)
SETTINGS: Final = {
    "scaling": "knative", "cluster_image": IMAGE, "cluster_store": "s3://models/prod", "threads": "2",
    "cluster_secret": "store", "cluster_timeout_s": "300",
    "cluster_features": ",".join(FEATURES), "cluster_cache": "/var/lib/kelvin-cache",
    "cluster_control": "https://control:7500", "cluster_snapshotter": "https://snapshotter:7501",
    "cluster_inner_secret": "inner",
    "cluster_nodes": "gpu=h100", "cluster_tolerations": "spot", "cluster_priority_class": "models",
    "cluster_device": "nvidia.com/gpu", "cluster_device_class": "h100", "cluster_namespace": "platform",
    "cluster_overlap_s": "1",
}  # fmt: skip


# The requirements of SETTINGS for a tenant's namespace.
NEEDS: Final = NamespaceRequirements(("inner", "store"), (), "privileged")


def make_tenant_namespace(server: ApiServer, tenant: str, needs: NamespaceRequirements = NEEDS) -> None:
    """Create a tenant's namespace, as an operator does. Access rights are not simulated."""
    for obj in render_namespace(tenant, needs, "platform"):
        if tenant.startswith("-"):  # a namespace of parked pods has no tenant
            obj["metadata"]["labels"] = {**PART_OF, ENFORCE: RESTRICTED}
        if obj["kind"] != "RoleBinding":
            server.create(obj)
    for name in needs.secrets:
        about = {"name": name, "namespace": f"kelvin-{tenant}"}
        server.create({"apiVersion": "v1", "kind": "Secret", "metadata": about})


class FakeKnative:
    """Plays Knative on the API server."""

    def __init__(self, server: ApiServer) -> None:
        """Create the namespace of the tenant `default`."""
        self.server = server
        make_tenant_namespace(server, "default")

    def services(self) -> set[str]:
        """Return the names of all Knative Services."""
        return {each["metadata"]["name"] for each in self.server.objects(SERVING, "Service")}

    def service(self, letter: str = "a") -> Json:
        """Return the Service of a version."""
        return self.server.get(SERVING, "Service", service_name("m", digest(letter)), NAMESPACE)

    def becomes_ready(self, letter: str = "a") -> str:
        """Set the newest revision ready and return its name."""
        found = self.service(letter)
        generation = found["metadata"]["generation"]
        name = f"{found['metadata']['name']}-{generation:05}"
        conditions = [{"type": kind, "status": "True"} for kind in ("ConfigurationsReady", "Ready")]
        names = {"latestCreatedRevisionName": name, "latestReadyRevisionName": name}
        self.server.set_status(found, {"conditions": conditions, "observedGeneration": generation, **names})
        return name

    def pods(self, *names: str, letter: str = "a", is_ready: bool = True) -> Json:
        """Set the pods of the version's first revision."""
        service = service_name("m", digest(letter))
        about = {
            "name": f"{service}-00001-private-x",
            "namespace": NAMESPACE,
            "labels": {
                "networking.internal.knative.dev/serviceType": "Private",
                "serving.knative.dev/service": service,
            },
        }
        endpoints = [
            {
                "addresses": ["10.0.0.1"],
                "conditions": {"ready": is_ready, "serving": is_ready, "terminating": False},
                "targetRef": {"kind": "Pod", "name": name, "namespace": NAMESPACE},
            }
            for name in names
        ]
        ports = [{"name": "http", "port": 8012, "protocol": "TCP"}]
        found = {"apiVersion": SLICES, "kind": "EndpointSlice", "metadata": about}
        full = {**found, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}
        if self.server.objects(SLICES, "EndpointSlice", NAMESPACE):
            return self.server.change(full, {"endpoints": endpoints, "ports": ports})
        return self.server.create(full)

    def leader(self) -> str:
        """Return the holder of the Lease, or an empty string."""
        leases = self.server.objects("coordination.k8s.io/v1", "Lease", "platform")
        return "".join(lease["spec"].get("holderIdentity") or "" for lease in leases)

    def forget_the_lease(self) -> None:
        """Clear the Lease's holder, as if its time were over after a kill."""
        self._give_the_lease({"holderIdentity": None})

    def take_the_lease(self) -> None:
        """Give the Lease to another holder for a second."""
        self._give_the_lease({"holderIdentity": "another", "leaseDurationSeconds": 1})

    def _give_the_lease(self, spec: Json) -> None:
        for lease in self.server.objects("coordination.k8s.io/v1", "Lease", "platform"):
            self.server.change(lease, {"spec": spec})


@contextmanager
def running(tmp_path: Path, **more: str) -> Iterator[Any]:
    """Run the control plane as a process. Each run uses the same data directory."""
    (tmp_path / "data" / "run" / "control.sock").unlink(missing_ok=True)
    with control_plane_process(tmp_path / "data", **(SETTINGS | more)) as process:
        yield process


@asynccontextmanager
async def inside(tmp_path: Path) -> AsyncIterator[ControlPlaneClient]:
    """Yield a client of the control plane, once its socket exists."""
    await eventually(lambda: (tmp_path / "data" / "run" / "control.sock").exists(), "the socket")
    async with connect_client(tmp_path / "data") as door:
        yield door


async def register(door: ControlPlaneClient, letter: str = "a") -> None:
    """Register a version, as the snapshotter does."""
    assert (await door.request("POST", "/internal/v1/versions", encode(registration("m", letter))))[0] == 201


async def until(reader: FeedReader, holds: Callable[[Feed], bool]) -> Feed:
    """Read the feed until a line fulfils the condition, and return it."""
    while not holds(line := await reader.line()):
        pass
    return line
