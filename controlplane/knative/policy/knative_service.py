"""Render a version as a Knative Service, so that an unmodified Knative scales it as one machine would.

The fields were tested against the webhook of knative/serving (98e5ef9). Some need a flag in its ConfigMap
`config-features`. Others, such as a termination grace period or lifecycle hooks, are not supported there.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from controlplane.knative.policy.object_labels import MODEL, RENDERING, RUNTIME, STREAMS, TENANT, VERSION
from controlplane.scaling.policy.kpa import TARGET_MIN
from controlplane.scaling.policy.windows import AverageKind
from kelvin.blobstore.s3_location import S3Location, parse_s3_url
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.setting_parser import BadSetting

SERVICE_API: Final = "serving.knative.dev/v1"
PORT: Final = 8080
DATA: Final = "/var/lib/kelvin"
INNER_TLS_DIRECTORY: Final = "/etc/kelvin/inner"
CACHE: Final = "/run/kelvin-cache"
PROCESS_BYTES: Final = 1 << 30  # libraries, their imports, and buffers of responses
SCRATCH_BYTES: Final = 1 << 30  # sockets, records, temporary files
TIMEOUT_S: Final = 600  # Knative's default for a revision's longest timeout (config-defaults)
PULL_S: Final = 300  # to pull an image that the node does not have
# When a pod is deleted, queue-proxy first waits this long for requests. The runtime gets no signal before.
QUEUE_PROXY_WAIT_S: Final = 30
FINAL_FLUSH_S: Final = 25  # for a process's work after its drain: last frames, last records
SLOWEST_BYTES_S: Final = 50 << 20  # per second; starts from slower stores fail
NODE_S: Final = 1800  # longest start of a pod whose node must be created first, image included
TRUST: Final = "/etc/kelvin/trust"
CACHE_NODE: Final = {"kelvin.dev/cache": "true"}  # the label of nodes that have a cache agent
LABEL_CHARS: Final = 63
EXTRA_CONCURRENCY: Final = 8  # cancellations and receipts that pass queue-proxy while all streams of a pod are taken
MAX_CONCURRENCY: Final = 1000  # Knative's default for a revision's highest concurrency (config-defaults)

# Without it, a response that begins before queue-proxy has read the whole request may be cut (golang/go#40747).
FULL_DUPLEX: Final = {"features.knative.dev/http-full-duplex": "Enabled"}

AUTOSCALING: Final = "autoscaling.knative.dev"
# Annotations of the template that say how a version is scaled. Operators and tenants decide them.
SCALE: Final = frozenset(
    f"{AUTOSCALING}/{name}"
    for name in (
        "min-scale", "max-scale", "target", "window", "scale-to-zero-pod-retention-period",
        "metric-aggregation-algorithm",
    )
)  # fmt: skip
STORE_RULE: Final = "must be s3://BUCKET/PREFIX, which pods can reach; push to an S3 store and name that one here"
IMAGE_RULE: Final = "must be an image's name, such as REGISTRY/NAME@sha256:DIGEST"
DEVICE_RULE: Final = "must be nvidia.com/gpu, or another resource of nvidia.com/"
ZERO_INITIAL_SCALE: Final = "allow-zero-initial-scale"  # in config-autoscaler: a Revision may begin without a pod

_Json = dict[str, Any]
_NVIDIA: Final = "nvidia.com/"
_IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


@dataclass(frozen=True, slots=True)
class Feature:
    """A field of the pod, and the key of `config-features` that allows it."""

    field: str
    flag: str


NODE_SELECTOR: Final = Feature("nodeSelector", "kubernetes.podspec-nodeselector")
TOLERATIONS: Final = Feature("tolerations", "kubernetes.podspec-tolerations")
PRIORITY: Final = Feature("priorityClassName", "kubernetes.podspec-priorityclassname")
SPREAD: Final = Feature("topologySpreadConstraints", "kubernetes.podspec-topologyspreadconstraints")
HOST_PATH: Final = Feature("hostPath", "kubernetes.podspec-volumes-hostpath")
FEATURES: Final = (NODE_SELECTOR, TOLERATIONS, PRIORITY, SPREAD, HOST_PATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodVersion:
    """The version to run. Bytes are of its weights and of a replica's KV memory."""

    tenant: str
    model: str
    version: str
    weight_bytes: int
    kv_bytes: int
    max_streams: int
    min_scale: int = 0
    max_scale: int = 1
    target: float | None = None  # concurrency of a replica; None: its streams
    window_s: float = 60.0
    grace_s: float = 30.0
    average: AverageKind = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEndpoints:
    """URLs of the rest of Kelvin, and the secret in tenants' namespaces with which pods authenticate as runtimes."""

    url: str
    snapshotter_url: str
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The cluster that pods are rendered for. `device` is `nvidia.com/gpu` or a slice of one; None: CPUs.

    `features` are the enabled keys of `config-features`, and `ZERO_INITIAL_SCALE` if it is enabled. `timeout_s` is the
    longest timeout that the cluster accepts.
    """

    image: str
    store_url: str
    namespace: str | None = None  # None: one for each tenant
    cores: int = 1
    device: str | None = None
    device_class: str | None = None
    features: frozenset[str] = frozenset()
    timeout_s: int = TIMEOUT_S
    secret: str | None = None  # its keys become the environment of the store's client
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    priority_class: str | None = None
    control: ControlEndpoints | None = None
    cache: str | None = None  # a directory of the nodes: `kelvin cache` keeps a tenant's versions in DIR/TENANT
    verify: str = "off"  # KELVIN_VERIFY of its pods: what to do with a version that no trust root signed
    trust: str | None = None  # a config map in each tenant's namespace that holds the trust roots
    notice_s: int | None = None  # seconds between a node's notice and its end; None: as long as a pod has


def parse_cluster_store(url: str) -> S3Location:
    """Parse the URL of a store that pods can reach. Raises BadSetting, which shows no secrets.

    A file store is a directory of one machine. Credentials in a URL would show in each Service.
    """
    if not url.startswith("s3://"):
        raise BadSetting("store", "…" if "@" in url else url.partition("?")[0], STORE_RULE)
    return parse_s3_url(url)


def is_image(name: str) -> bool:
    """Return whether all characters are allowed in an image's name. A tag is as good as a digest here."""
    return _IMAGE.fullmatch(name) is not None


def render_service(version: PodVersion, cluster: ClusterSpec) -> dict[str, Any]:
    """Return the Service object, without a status. Raises Refused(InvalidRequest) if the cluster would refuse it."""
    obj: _Json = {
        "apiVersion": SERVICE_API,
        "kind": "Service",
        "metadata": {
            "name": service_name(version.model, version.version),
            "namespace": namespace_of(version.tenant, cluster),
            "labels": {**_labels(version), "networking.knative.dev/visibility": "cluster-local"},
            "annotations": {VERSION: version.version, STREAMS: str(version.max_streams)},
        },
        "spec": {
            "template": {
                "metadata": {
                    "labels": _labels(version),
                    "annotations": {VERSION: version.version, **_scaling(version)},
                },
                "spec": render_pod_spec(version, cluster),
            }
        },
    }
    # Only on the Service: on the template, a new annotation alone would make a new Revision.
    obj["metadata"]["annotations"][RENDERING] = _digest(obj)
    return obj


def _digest(obj: _Json) -> str:
    """Return the digest of a rendered Service without its scale. It stays the same while Kelvin renders the same."""
    template = obj["spec"]["template"]
    kept = {name: value for name, value in template["metadata"]["annotations"].items() if name not in SCALE}
    whole = {**obj, "spec": {"template": {**template, "metadata": {**template["metadata"], "annotations": kept}}}}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def service_name(model: str, version: str) -> str:
    """Return a DNS label that is unique for the version in its tenant's namespace. A long model name is cut."""
    digits = version[:12]
    return f"{model[: LABEL_CHARS - 1 - len(digits)].rstrip('-')}-{digits}"


def namespace_of(tenant: str, cluster: ClusterSpec) -> str:
    """Return the tenant's own namespace, or the one that the cluster names. Raises Refused."""
    return require_dns_label(f"kelvin-{tenant}" if cluster.namespace is None else cluster.namespace, "namespace")


def memory_bytes(version: PodVersion, cluster: ClusterSpec) -> int:
    """Return the memory limit of the pod. It includes the weights unless its node's cache agent holds them."""
    return _private_weight_bytes(version, cluster) + version.kv_bytes + PROCESS_BYTES


def _private_weight_bytes(version: PodVersion, cluster: ClusterSpec) -> int:
    """Return the bytes of weights that the pod's own cache agent keeps, in memory and on disk."""
    return version.weight_bytes if cluster.cache is None else 0


def start_limit_s(version: PodVersion) -> int:
    """Return the seconds after which a start has failed: time to pull the image, and twice the time for the bytes."""
    return PULL_S + 2 * ceil(version.weight_bytes / SLOWEST_BYTES_S)


def progress_deadline_s(version: PodVersion) -> int:
    """Return after how many seconds Knative gives up a revision without a ready pod.

    A start may need a new node. Knative's own 600 s, or the time for the bytes alone, would be too short.
    """
    return max(NODE_S, start_limit_s(version))


def drain_s(cluster: ClusterSpec) -> int:
    """Return the longest drain in seconds. A pod's time to end is its revision's timeout, counted from its deletion.
    Requests that outlive the drain end with an error and are recorded; those that outlive the pod are not. A node that
    goes away gives its pods less time (`notice_s`). Pods don't know why they end, so no drain is longer than that.
    """
    given_s = cluster.timeout_s if cluster.notice_s is None else min(cluster.timeout_s, cluster.notice_s)
    return max(1, given_s - QUEUE_PROXY_WAIT_S - FINAL_FLUSH_S)


def _labels(version: PodVersion) -> dict[str, str]:
    return {
        **RUNTIME,
        TENANT: version.tenant,
        MODEL: version.model,
    }


def _scaling(version: PodVersion) -> dict[str, str]:
    """Return the annotations that scale the version as one machine would (`version_scaler.scaling_spec`). Other
    settings are Knative's defaults in both cases. Raises Refused(InvalidRequest).
    """
    if version.target is not None and version.target < TARGET_MIN:
        rule = f"must be {TARGET_MIN} or more on a cluster"
        raise Refused(InvalidRequest("target", format(version.target, "g"), rule))
    settings: dict[str, object] = {
        "class": "kpa.autoscaling.knative.dev",
        "metric": "concurrency",
        "min-scale": version.min_scale,
        "max-scale": version.max_scale,
        "window": _whole_seconds("window_s", version.window_s),
        "target-burst-capacity": -1,  # the activator is always in the path, so only its reports count
        "scale-to-zero-pod-retention-period": _whole_seconds("grace_s", version.grace_s),
    }
    if version.average == "weighted":  # only then: Knative's default is linear
        settings["metric-aggregation-algorithm"] = "weighted-exponential"
    # Always set, and never above the streams: Knative would bound it by queue-proxy's limit, which is higher.
    target = version.max_streams if version.target is None else min(version.target, version.max_streams)
    settings["target"] = format(target, "g")
    return {
        **{f"{AUTOSCALING}/{name}": str(value) for name, value in settings.items()},
        "serving.knative.dev/progress-deadline": f"{progress_deadline_s(version)}s",
        **FULL_DUPLEX,
    }


def _whole_seconds(name: str, seconds: float) -> str:
    if seconds != int(seconds):
        raise Refused(InvalidRequest(name, format(seconds, "g"), "must be whole seconds on a cluster"))
    return f"{int(seconds)}s"


def render_pod_spec(version: PodVersion, cluster: ClusterSpec) -> dict[str, Any]:
    """Return the spec of a pod that serves the version. Raises Refused(InvalidRequest)."""
    return {
        "containerConcurrency": min(version.max_streams + EXTRA_CONCURRENCY, MAX_CONCURRENCY),
        "timeoutSeconds": cluster.timeout_s,
        "responseStartTimeoutSeconds": cluster.timeout_s,  # a long prompt sends nothing for a long time
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [_container(version, cluster)],
        "volumes": [
            {"name": "data", "emptyDir": {"sizeLimit": _amount(_disk_bytes(version, cluster))}},
            {"name": "tmp", "emptyDir": {"sizeLimit": _amount(SCRATCH_BYTES)}},
            *(volume for volume, _, _ in _shared_volumes(version, cluster)),
        ],
        **_placement(version, cluster),
    }


def _container(version: PodVersion, cluster: ClusterSpec) -> dict[str, Any]:
    command = ["runtime", version.version, "--tenant", version.tenant, "--model", version.model]
    command += ["--threads", str(cluster.cores)]
    if cluster.device_class is not None:
        command += ["--device-class", cluster.device_class]
    container = {
        "name": "runtime",
        "image": cluster.image,
        "args": command,
        "ports": [{"name": "http1", "containerPort": PORT}],
        "env": [
            {"name": "KELVIN_DATA", "value": DATA},
            {"name": "KELVIN_STORE", "value": cluster.store_url},
            {"name": "KELVIN_KV_BYTES", "value": str(version.kv_bytes)},
            {"name": "KELVIN_RUNTIME_DRAIN_S", "value": str(drain_s(cluster))},
            *([{"name": "KELVIN_VERIFY", "value": cluster.verify}] if cluster.verify != "off" else ()),
            *(each for _, _, settings in _shared_volumes(version, cluster) for each in settings),
        ],
        "resources": _resources(version, cluster),
        # Each probe names a port: without one, the webhook refuses a start-up probe.
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": PORT}, "periodSeconds": 1, "failureThreshold": 3},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, "periodSeconds": 10, "timeoutSeconds": 5},
        # Imports come before the port, so liveness is not probed until the runtime listens.
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": PORT},
            "periodSeconds": 1,
            "failureThreshold": start_limit_s(version),
        },
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "data", "mountPath": DATA},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *(mount for _, mount, _ in _shared_volumes(version, cluster)),
        ],
    }
    if cluster.secret is not None:
        # Optional: if the service account has rights in the store, there is no such secret.
        container["envFrom"] = [{"secretRef": {"name": cluster.secret, "optional": True}}]
    return container


def _shared_volumes(version: PodVersion, cluster: ClusterSpec) -> Iterator[tuple[_Json, _Json, list[_Json]]]:
    """Yield the pod's volumes from outside: volume, mount, and settings that name it. All are mounted read-only, so no
    pod can replace the socket of its agent.
    """
    if (control := cluster.control) is not None:
        volume = {"name": "inner", "secret": {"secretName": control.secret}}
        settings = {
            "KELVIN_CONTROL": control.url,
            "KELVIN_SNAPSHOTTER": control.snapshotter_url,
            "KELVIN_INNER_TLS": INNER_TLS_DIRECTORY,
        }
        mount = {"name": "inner", "mountPath": INNER_TLS_DIRECTORY, "readOnly": True}
        yield volume, mount, [{"name": name, "value": value} for name, value in settings.items()]
    if cluster.trust is not None:
        # Not optional: a pod without its trust roots must not start as if none were required.
        volume = {"name": "trust", "configMap": {"name": cluster.trust}}
        mount = {"name": "trust", "mountPath": TRUST, "readOnly": True}
        yield volume, mount, [{"name": "KELVIN_TRUST_ROOTS", "value": TRUST}]
    if cluster.cache is not None:
        _allow(cluster, HOST_PATH, cluster.cache)
        directory = f"{cluster.cache}/{version.tenant}/run"
        volume = {"name": "cache", "hostPath": {"path": directory, "type": "Directory"}}
        mount = {"name": "cache", "mountPath": CACHE, "readOnly": True}
        yield volume, mount, [{"name": "KELVIN_CACHE_AGENT", "value": CACHE}]


def _disk_bytes(version: PodVersion, cluster: ClusterSpec) -> int:
    """Return the disk space for a copy of the weights, unless the node has one, and for scratch files."""
    return _private_weight_bytes(version, cluster) + SCRATCH_BYTES


def _resources(version: PodVersion, cluster: ClusterSpec) -> dict[str, dict[str, str]]:
    memory, disk = _amount(memory_bytes(version, cluster)), _amount(_disk_bytes(version, cluster) + SCRATCH_BYTES)
    needed = {"cpu": _amount(cluster.cores), "memory": memory, "ephemeral-storage": disk}
    limits = {"memory": memory, "ephemeral-storage": disk}  # no CPU limit: idle cores may be used
    if cluster.device is not None:
        if not cluster.device.startswith(_NVIDIA):
            raise Refused(InvalidRequest("device", cluster.device, DEVICE_RULE))
        limits[cluster.device] = needed[cluster.device] = "1"
    return {"requests": needed, "limits": limits}


def _amount(number: int) -> str:
    """Return a quantity in Kubernetes' own notation (8000 is `8k`), so that the cluster keeps it unchanged."""
    for suffix in ("", "k", "M", "G", "T"):
        if number == 0 or number % 1000:
            return f"{number}{suffix}"
        number //= 1000
    return f"{number}P"


def _placement(version: PodVersion, cluster: ClusterSpec) -> dict[str, Any]:
    """Return the fields that choose nodes. They must be allowed. Replicas are spread over zones if that is allowed."""
    wanted_fields: list[tuple[Feature, Any]] = []
    # A pod that reads weights from its node's agent can start on no other node.
    nodes = {**cluster.node_selector, **(CACHE_NODE if cluster.cache is not None else {})}
    if nodes:
        wanted_fields.append((NODE_SELECTOR, nodes))
    if cluster.tolerations:
        wanted_fields.append((TOLERATIONS, [dict(each) for each in cluster.tolerations]))
    if cluster.priority_class is not None:
        wanted_fields.append((PRIORITY, cluster.priority_class))
    for feature, value in wanted_fields:
        _allow(cluster, feature, value)
    placed = {feature.field: value for feature, value in wanted_fields}
    if SPREAD.flag in cluster.features:
        placed[SPREAD.field] = [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {MODEL: version.model, TENANT: version.tenant}},
            }
        ]
    return placed


def _allow(cluster: ClusterSpec, feature: Feature, value: object) -> None:
    """Raise Refused if the cluster does not allow that field."""
    if feature.flag not in cluster.features:
        rule = f"needs {feature.flag} in config-features, which is not on"
        raise Refused(InvalidRequest(feature.field, str(value)[:80], rule))
