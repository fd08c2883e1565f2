"""The pods that wait for versions as a Knative Service: one for each kind of pod, which Knative keeps as many of as it
is told are wanted.

Their concurrency is what activators report (`placement.reported`): one for each pod, so that the target is one, and all
of it. What is not said here is as with a version's own pods (`knative_service`).
"""

from dataclasses import replace
from typing import Any, Final

from controlplane.knative.policy.knative_service import (
    FULL_DUPLEX,
    SPREAD,
    ClusterSpec,
    PodVersion,
    pod_spec,
    progress_deadline_s,
)
from controlplane.knative.policy.object_labels import POOL, RUNTIME, NamespacedName
from controlplane.knative.policy.pod_placement import PoolSpec

LISTEN_PORT: Final = 7510  # where a pod is told which version to take
NAMESPACE: Final = "kelvin--pools"  # no tenant's: none has a name that begins with a hyphen
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
BOUND_DELETION_COST: Final = "1000"  # who has a version is ended after all that wait
_FAILURES: Final = 12  # of a liveness probe: between two lives nobody listens
_AUTOSCALING: Final = "autoscaling.knative.dev"


def pool_place(pool: PoolSpec, cluster: ClusterSpec) -> NamespacedName:
    """Namespace and name, which is no version's: those have one hyphen before their digits."""
    return cluster.namespace or NAMESPACE, f"kelvin-pool--{pool.name}"


def device_class_of(cluster: ClusterSpec) -> str:
    """What pods compute on."""
    return cluster.device_class or f"cpu-{cluster.cores}"


def pool_service(pool: PoolSpec, cluster: ClusterSpec, kv_bytes: int) -> dict[str, Any]:
    """The object, without a status. Raises `Refused(InvalidRequest)` where the cluster would refuse it. `cluster` has a
    `control`.
    """
    template = PodVersion(
        tenant="", model="", version="", weight_bytes=pool.weight_bytes, kv_bytes=kv_bytes, max_streams=1
    )
    namespace, name = pool_place(pool, cluster)
    labels = {**RUNTIME, POOL: pool.name}
    return {
        "apiVersion": "serving.knative.dev/v1",
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
    told: dict[str, object] = {
        "class": "kpa.autoscaling.knative.dev",
        "metric": "concurrency",
        "min-scale": pool.waiting,  # also while nobody reports
        "max-scale": pool.most,
        "target": 1,
        "target-utilization-percentage": 100,
        "target-burst-capacity": -1,  # what is reported is all that counts
    }
    return {
        **{f"{_AUTOSCALING}/{name}": str(value) for name, value in told.items()},
        "serving.knative.dev/progress-deadline": f"{progress_deadline_s(template)}s",
        **FULL_DUPLEX,
    }


def _pod(pool: PoolSpec, template: PodVersion, cluster: ClusterSpec) -> dict[str, Any]:
    """A cache that is one tenant's is none of theirs: they have an agent each."""
    spec = pod_spec(template, replace(cluster, cache=None))
    spec["containerConcurrency"] = 0  # by version: activators know
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
