"""The purpose of each component, as checks on the objects that it was built into."""

from collections.abc import Callable, Mapping
from typing import Final

from controlplane.knative.cluster_settings import ClusterSettings, read_cluster
from controlplane.knative.policy.knative_service import CACHE_NODE, HOST_PATH, ClusterSpec, drain_s
from controlplane.knative.policy.object_labels import POOL, RUNTIME
from controlplane.knative.policy.pool_service import LISTEN_PORT, NAMESPACE
from tests.manifests.kustomize_build import Json, find, of_base, pod_of
from tests.manifests.network_reach import Pod, may
from tests.manifests.pod_processes import environment_of
from tests.manifests.test_network_reach import ACTIVATOR, CONTROLPLANE, OUTSIDE, REPLICA, SNAPSHOTTER, STRANGER

Effect = Callable[[list[Json]], bool]

ZONES: Final = "topology.kubernetes.io/zone"
POSTGRES: Final = Pod("kelvin", {"app.kubernetes.io/name": "postgres"})
AGENTS: Final = "DaemonSet"
AGENT: Final = Pod("kelvin-default", {"app.kubernetes.io/name": "cache-agent"})
PROMETHEUS: Final = Pod("monitoring", {"app.kubernetes.io/name": "prometheus"})
PARKED: Final = Pod(NAMESPACE, {**RUNTIME, POOL: "small"})
ISTIOD: Final = Pod("istio-system", {"app": "istiod"})


def pod(objects: list[Json], name: str, kind: str = "Deployment") -> Json:
    """Return the pod spec of a workload."""
    found = pod_of(find(objects, kind, name))
    assert found is not None
    return found


def container(objects: list[Json], name: str, which: str) -> Json:
    """Return a container of a Deployment."""
    (found,) = (each for each in pod(objects, name)["containers"] if each["name"] == which)
    return dict(found)


def env_of(objects: list[Json], name: str, kind: str = "Deployment") -> Mapping[str, str]:
    """Return the environment of a workload's first container."""
    return environment_of(objects, pod(objects, name, kind)["containers"][0])


def settings(objects: list[Json]) -> ClusterSettings:
    """Return the cluster settings as the control plane reads them."""
    found = read_cluster(env_of(objects, "controlplane"), 1)
    assert found is not None
    return found


def renders(objects: list[Json]) -> ClusterSpec:
    """Return how replicas' pods are rendered."""
    return settings(objects).pods


def _platform_keeps(objects: list[Json], kind: str, key: str) -> bool:
    """Return whether the platform's own pods avoid nodes with that label, by a rule of this kind."""
    pods = [pod_of(each) for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    return all(each and key in str(each.get("affinity", {}).get("nodeAffinity", {}).get(kind, "")) for each in pods)


def _off_devices(objects: list[Json]) -> bool:
    return _platform_keeps(objects, "preferredDuringSchedulingIgnoredDuringExecution", "nvidia.com/gpu.present")


def _sidecar(objects: list[Json], name: str) -> Mapping[str, str]:
    found: Mapping[str, str] = find(objects, "Deployment", name)["spec"]["template"]["metadata"]["annotations"]
    return found


def _yields(objects: list[Json], name: str) -> bool:
    """Return whether pods of that priority class never preempt others."""
    found = find(objects, "PriorityClass", name)
    return bool(found.get("preemptionPolicy") == "Never")


def _trusts(objects: list[Json], name: str, which: str) -> bool:
    """Return whether the container mounts the trust roots at the path in its settings."""
    found = container(objects, name, which)
    roots = environment_of(objects, found)["KELVIN_TRUST_ROOTS"]
    return any(each["mountPath"] == roots for each in found["volumeMounts"])


def _tolerated(objects: list[Json]) -> set[str]:
    return {each["key"] for each in renders(objects).tolerations}


EFFECTS: Final[tuple[tuple[str, Effect], ...]] = (
    (
        "multi-zone",
        lambda o: all(
            [(each["topologyKey"], each["whenUnsatisfiable"]) for each in pod(o, name)["topologySpreadConstraints"]]
            == [(ZONES, "DoNotSchedule")]
            for name in ("activator", "controlplane")
        ),
    ),
    ("multi-zone", lambda o: find(o, "HorizontalPodAutoscaler", "activator")["spec"]["minReplicas"] == 3),
    ("mesh", lambda o: find(o, "Namespace", "kelvin")["metadata"]["labels"]["istio-injection"] == "enabled"),
    ("mesh", lambda o: find(o, "PeerAuthentication", "kelvin")["spec"]["mtls"]["mode"] == "STRICT"),
    # Otherwise a scraper without a sidecar is refused, and the front door sees its own sidecar as the client.
    ("mesh", lambda o: _sidecar(o, "activator")["traffic.sidecar.istio.io/excludeInboundPorts"] == "8443,7480"),
    ("trial", lambda o: may(o, CONTROLPLANE, POSTGRES, 5432)),
    ("trial", lambda o: env_of(o, "snapshotter")["KELVIN_STORE"].endswith("http://s3.kelvin.svc:9000")),
    ("gpu", lambda o: renders(o).device == "nvidia.com/gpu"),
    ("gpu", lambda o: "nvidia.com/gpu" in _tolerated(o)),
    ("gpu", _off_devices),
    ("mig", lambda o: renders(o).device == "nvidia.com/mig-1g.10gb"),
    ("mig", lambda o: "nvidia.com/gpu" in _tolerated(o)),
    ("mig", _off_devices),
    ("spot", lambda o: renders(o).node_selector == {"kelvin.dev/capacity": "spot"}),
    ("spot", lambda o: "kelvin.dev/capacity" in _tolerated(o)),
    ("spot", lambda o: _platform_keeps(o, "requiredDuringSchedulingIgnoredDuringExecution", "kelvin.dev/capacity")),
    # The notice covers queue-proxy's pause and the last records as well.
    ("spot", lambda o: drain_s(renders(o)) <= 30),
    ("cache-agent", lambda o: renders(o).cache is not None),
    ("cache-agent", lambda o: renders(o).features == renders(of_base()).features | {HOST_PATH.flag}),
    # It runs only on nodes that are labelled for a cache, where replicas go, too, and preempts no pod.
    ("cache-agent", lambda o: pod(o, "cache-agent", AGENTS)["nodeSelector"] == CACHE_NODE),
    ("cache-agent", lambda o: _yields(o, pod(o, "cache-agent", AGENTS)["priorityClassName"])),
    ("verify", lambda o: (renders(o).verify, renders(o).trust) == ("require", "kelvin-trust")),
    ("verify", lambda o: all(_trusts(o, "snapshotter", each) for each in ("snapshotter", "engine"))),
    ("verify", lambda o: environment_of(o, container(o, "snapshotter", "engine"))["KELVIN_VERIFY"] == "require"),
    # It runs where replicas run, and uses their store.
    ("cache-agent", lambda o: _tolerated(o) <= {each["key"] for each in pod(o, "cache-agent", AGENTS)["tolerations"]}),
    ("cache-agent", lambda o: env_of(o, "cache-agent", AGENTS)["KELVIN_STORE"] == renders(o).store_url),
    # The store's port of the setting, instead of 443.
    ("store-port", lambda o: all(may(o, each, OUTSIDE, 9000) for each in (SNAPSHOTTER, REPLICA))),
    ("store-port", lambda o: not any(may(o, each, OUTSIDE, 443) for each in (SNAPSHOTTER, REPLICA))),
    ("monitoring", lambda o: may(o, PROMETHEUS, ACTIVATOR, 7480) and not may(o, STRANGER, ACTIVATOR, 7480)),
    ("certificates", lambda o: find(o, "Certificate", "kelvin-inner-runtime", "kelvin-default") is not None),
    ("pools", lambda o: settings(o).pools.pools != ()),
    ("pools", lambda o: find(o, "Role", "controlplane", NAMESPACE)["rules"][0]["verbs"] == ["patch"]),
    ("pools", lambda o: find(o, "NetworkPolicy", "orders", NAMESPACE) is not None),
    ("pools", lambda o: may(o, CONTROLPLANE, PARKED, LISTEN_PORT) and not may(o, ACTIVATOR, PARKED, LISTEN_PORT)),
    ("pools-mesh", lambda o: may(o, PARKED, ISTIOD, 15012) and find(o, "NetworkPolicy", "mesh", NAMESPACE) is not None),
    ("pools-certificates", lambda o: find(o, "Certificate", "kelvin-inner-runtime", NAMESPACE) is not None),
)  # fmt: skip
