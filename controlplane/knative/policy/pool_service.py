"""Render the Knative Service of a pool: pods that wait for versions. Knative keeps as many as are reported as
concurrency.

Activators report one unit of concurrency per wanted pod (`pod_placement.pool_concurrency`), so the target is one, fully
used. Everything else is as for a version's own pods (`knative_service.py`).
"""

from dataclasses import replace
from typing import Any, Final

from controlplane.knative.policy.knative_service import (
    AUTOSCALING,
    FULL_DUPLEX,
    SERVICE_API,
    SPREAD,
    ClusterSpec,
    PodVersion,
    progress_deadline_s,
    render_pod_spec,
)
from controlplane.knative.policy.object_labels import POOL, RUNTIME, NamespacedName
from controlplane.knative.policy.pod_placement import PoolSpec

LISTEN_PORT: Final = 7510  # port on which a pod is told which version to take
NAMESPACE: Final = "kelvin--pools"  # no tenant's: tenant names don't begin with a hyphen
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
BOUND_DELETION_COST: Final = "1000"  # pods with a version are ended after all pods that wait
_FAILURES: Final = 12  # of a liveness probe: between two lives of a pod nothing listens


def pool_service_name(pool: PoolSpec, cluster: ClusterSpec) -> NamespacedName:
    """Return namespace and name. No version's Service has this name: those have one hyphen before their digits."""
    return cluster.namespace or NAMESPACE, f"kelvin-pool--{pool.name}"


def device_class_of(cluster: ClusterSpec) -> str:
    """Return the device class of pods on this cluster."""
    return cluster.device_class or f"cpu-{cluster.cores}"


def render_pool_service(pool: PoolSpec, cluster: ClusterSpec, kv_bytes: int) -> dict[str, Any]:
    """Return the Service object, without a status. `cluster` must have `control`. Raises Refused(InvalidRequest) if the
    cluster would refuse it.
    """
    template = PodVersion(
        tenant="", model="", version="", weight_bytes=pool.weight_bytes, kv_bytes=kv_bytes, max_streams=1
    )
    namespace, name = pool_service_name(pool, cluster)
    labels = {**RUNTIME, POOL: pool.name}
    return {
        "apiVersion": SERVICE_API,
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {**labels, "networking.knative.dev/visibility": "cluster-local"},
        },
        "spec": {
            "template": {
                "metadata": {"labels": labels, "annotations": _scaling(pool, template)},
                "spec": _pod(pool, template, cluster),
            }
        },
    }


def _scaling(pool: PoolSpec, template: PodVersion) -> dict[str, str]:
    settings: dict[str, object] = {
        "class": "kpa.autoscaling.knative.dev",
        "metric": "concurrency",
        "min-scale": pool.min_waiting,  # also while nothing is reported
        "max-scale": pool.maximum,
        "target": 1,
        "target-utilization-percentage": 100,
        "target-burst-capacity": -1,  # only reports count
    }
    return {
        **{f"{AUTOSCALING}/{name}": str(value) for name, value in settings.items()},
        "serving.knative.dev/progress-deadline": f"{progress_deadline_s(template)}s",
        **FULL_DUPLEX,
    }


def _pod(pool: PoolSpec, template: PodVersion, cluster: ClusterSpec) -> dict[str, Any]:
    """Return the pod's spec. Pooled pods have an agent each, because a node's cache belongs to one tenant."""
    spec = render_pod_spec(template, replace(cluster, cache=None))
    spec["containerConcurrency"] = 0  # unlimited: activators limit it by version
    (container,) = spec["containers"]
    container["args"] = [
        "runtime", "--standby", device_class_of(cluster), "--threads", str(cluster.cores),
        "--weights", str(pool.weight_bytes),
    ]  # fmt: skip
    container["env"].append({"name": "KELVIN_STANDBY_LISTEN", "value": f"0.0.0.0:{LISTEN_PORT}"})
    container["livenessProbe"]["failureThreshold"] = _FAILURES
    for spread in spec.get(SPREAD.field, ()):
        spread["labelSelector"] = {"matchLabels": {POOL: pool.name}}
    return spec
