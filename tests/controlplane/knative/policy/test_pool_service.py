"""A pool's Service: valid on a cluster, with parked runtimes, scaled only by reported concurrency."""

from dataclasses import replace

import pytest

from controlplane.knative.policy.knative_service import ClusterSpec, namespace_of, service_name
from controlplane.knative.policy.pod_placement import PoolSpec
from controlplane.knative.policy.pool_service import pool_service_name, render_pool_service
from tests.controlplane.knative.policy.test_knative_service import CLUSTER, CRD, EVERYTHING, faults

POOL = PoolSpec("small", 1 << 30, 2, 8)
CONTROLLED = replace(CLUSTER, control=EVERYTHING.control)


@pytest.mark.skipif(not CRD.exists(), reason="Knative's CRDs are not in shared/")
@pytest.mark.parametrize("cluster", [CONTROLLED, EVERYTHING])
def test_pool_service_matches_the_schema(cluster: ClusterSpec) -> None:
    assert faults(render_pool_service(POOL, cluster, 2 << 30)) == []


@pytest.mark.parametrize("cluster", [CONTROLLED, EVERYTHING])
def test_pool_pod_waits_for_control_requests(cluster: ClusterSpec) -> None:
    """It listens with mutual TLS, has its device class and memory for weights, and no tenant's cache."""
    rendered = render_pool_service(POOL, cluster, 2 << 30)
    (container,) = rendered["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert container["args"][:3] == ["runtime", "--standby", cluster.device_class or "cpu-1"]
    assert container["args"][-2:] == ["--weights", str(1 << 30)]
    assert env["KELVIN_STANDBY_LISTEN"] == "0.0.0.0:7510"
    assert env["KELVIN_INNER_TLS"]
    assert "KELVIN_CACHE_AGENT" not in env
    assert container["resources"]["limits"]["memory"] == str((1 << 30) + (2 << 30) + (1 << 30))
    assert all(each["secretRef"]["optional"] for each in container.get("envFrom", ()))


def test_pool_scales_by_reported_concurrency() -> None:
    """One pod per unit of concurrency: two without reports, at most eight."""
    template = render_pool_service(POOL, CONTROLLED, 2 << 30)["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    found = {name.removeprefix("autoscaling.knative.dev/"): value for name, value in annotations.items()}
    assert found == {
        "class": "kpa.autoscaling.knative.dev",
        "metric": "concurrency",
        "min-scale": "2",
        "max-scale": "8",
        "target": "1",
        "target-utilization-percentage": "100",
        "target-burst-capacity": "-1",
        "serving.knative.dev/progress-deadline": "1800s",
        "features.knative.dev/http-full-duplex": "Enabled",
    }
    assert template["spec"]["containerConcurrency"] == 0


def test_pool_name_collides_with_no_tenant_or_version() -> None:
    namespace, name = pool_service_name(POOL, CONTROLLED)
    assert namespace != namespace_of("pools", CONTROLLED)
    assert name != service_name("kelvin-pool", "0" * 64)
    assert pool_service_name(POOL, EVERYTHING)[0] == "models"
