"""Parked pods have the rights of a tenant's replicas, and only the control plane may send them control requests."""

from collections.abc import Callable
from typing import Final

import pytest

from controlplane.knative.policy.object_labels import RUNTIME
from controlplane.knative.policy.pool_service import LISTEN_PORT, NAMESPACE, render_pool_service
from kelvin.contracts.names import require_dns_label
from tests.manifests import rules
from tests.manifests.component_effects import ISTIOD, PARKED, settings
from tests.manifests.kustomize_build import Json, build_with_components, find, kustomize, of_base
from tests.manifests.network_reach import Pod, may, without_rules
from tests.manifests.test_component_order import PAGE
from tests.manifests.test_network_reach import (
    ACTIVATOR,
    CONTROLPLANE,
    KNATIVE,
    NAMES,
    OUTSIDE,
    REPLICA,
    SNAPSHOTTER,
    STRANGER,
)

pytestmark = pytest.mark.skipif(kustomize() is None, reason="no kustomize 5: kubectl 1.27 or later has it")

NAMESAKE: Final = Pod("elsewhere", CONTROLPLANE.labels)
BESIDE: Final = Pod(NAMESPACE, {"app": "miner"})
S3: Final = Pod("kelvin", {"app.kubernetes.io/name": "s3"})
READS: Final = frozenset({"get", "list", "watch"})
Harm = Callable[[list[Json]], object]


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        pytest.param(CONTROLPLANE, PARKED, LISTEN_PORT, id="control requests"),
        pytest.param(ACTIVATOR, PARKED, 8012, id="requests, through queue-proxy"),
        pytest.param(KNATIVE["activator"], PARKED, 8012, id="probes of Knative's activator"),
        pytest.param(KNATIVE["autoscaler"], PARKED, 9090, id="queue-proxy's figures"),
        pytest.param(PARKED, CONTROLPLANE, 7500, id="usage records"),
        pytest.param(PARKED, SNAPSHOTTER, 7501, id="seals"),
        pytest.param(PARKED, NAMES, 53, id="DNS"),
        pytest.param(PARKED, OUTSIDE, 443, id="the store"),
    ],
)
def test_needed_pool_connections_are_allowed(source: Pod, target: Pod, port: int) -> None:
    """Control: without the rules the connection is refused."""
    objects = build_with_components("pools")
    assert may(objects, source, target, port)
    assert not may(without_rules(objects), source, target, port)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        pytest.param(ACTIVATOR, PARKED, LISTEN_PORT, id="control requests of an activator"),
        pytest.param(SNAPSHOTTER, PARKED, LISTEN_PORT, id="control requests of the snapshotter"),
        pytest.param(KNATIVE["activator"], PARKED, LISTEN_PORT, id="control requests of Knative"),
        pytest.param(REPLICA, PARKED, LISTEN_PORT, id="control requests of a replica"),
        pytest.param(Pod("kelvin-acme", RUNTIME), PARKED, LISTEN_PORT, id="control requests of another tenant"),
        pytest.param(PARKED, PARKED, LISTEN_PORT, id="control requests of a parked pod"),
        pytest.param(NAMESAKE, PARKED, LISTEN_PORT, id="control requests of a foreign namesake"),
        pytest.param(STRANGER, PARKED, 8012, id="around the front door"),
        pytest.param(CONTROLPLANE, PARKED, 8012, id="requests of the control plane"),
        pytest.param(CONTROLPLANE, REPLICA, LISTEN_PORT, id="the control plane, to a tenant's replica"),
        pytest.param(CONTROLPLANE, BESIDE, LISTEN_PORT, id="the control plane, to another pod there"),
        pytest.param(PARKED, REPLICA, 8012, id="a parked pod, to a replica"),
        pytest.param(REPLICA, PARKED, 8012, id="a replica, to a parked pod"),
        pytest.param(PARKED, OUTSIDE, 5432, id="to the database"),
        pytest.param(PARKED, OUTSIDE, 6443, id="to the API server"),
        pytest.param(BESIDE, OUTSIDE, 443, id="another pod there, to anywhere"),
    ],
)
def test_unneeded_pool_connections_are_refused(source: Pod, target: Pod, port: int) -> None:
    """Control: without the policies the connection is allowed."""
    assert not may(build_with_components("pools"), source, target, port)
    assert may([], source, target, port)


def _orders(objects: list[Json]) -> Json:
    return find(objects, "NetworkPolicy", "orders", NAMESPACE)


def _way(objects: list[Json]) -> Json:
    return find(objects, "NetworkPolicy", "controlplane-to-pools", "kelvin")


def _let_activators(objects: list[Json]) -> None:
    _orders(objects)["spec"]["ingress"][0].pop("from")
    for rule in find(objects, "NetworkPolicy", "activator", "kelvin")["spec"]["egress"]:
        rule["ports"].append({"protocol": "TCP", "port": LISTEN_PORT})


@pytest.mark.parametrize(
    ("harm", "source", "passes"),
    [
        pytest.param(lambda o: o.remove(_orders(o)), CONTROLPLANE, False, id="no ingress rule"),
        pytest.param(lambda o: o.remove(_way(o)), CONTROLPLANE, False, id="no egress rule"),
        pytest.param(lambda o: _orders(o)["spec"]["ingress"][0].pop("from"), NAMESAKE, True, id="ingress for all"),
        pytest.param(_let_activators, ACTIVATOR, True, id="ingress and egress for activators"),
        pytest.param(lambda o: o.remove(_orders(o)), NAMESAKE, False, id="closed without the ingress rule"),
    ],
)
def test_both_ends_say_who_gives_orders(harm: Harm, source: Pod, passes: bool) -> None:
    """Control: removing or widening one of the two policies makes the tests above fail."""
    objects = build_with_components("pools")
    harm(objects)
    assert may(objects, source, PARKED, LISTEN_PORT) is passes


def _writers(objects: list[Json]) -> list[tuple[str, str | None, set[str]]]:
    """Return the roles that may write pods: kind, namespace and verbs."""
    return [
        (each["kind"], each["metadata"].get("namespace"), set(rule["verbs"]) - READS)
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
        for rule in each["rules"]
        if "pods" in rule["resources"] and set(rule["verbs"]) - READS
    ]


def test_pool_rights_are_limited_to_its_namespace() -> None:
    """The control plane may patch pods there and in its own namespace, and write none elsewhere."""
    objects = build_with_components("pools")
    own = ("Role", "kelvin", {"patch"})
    assert _writers(of_base()) == [own]
    assert sorted(_writers(objects)) == [own, ("Role", NAMESPACE, {"patch"})]
    assert list(rules.rights(objects)) == []
    (who,) = find(objects, "RoleBinding", "controlplane", NAMESPACE)["subjects"]
    assert (who["namespace"], who["name"]) == ("kelvin", "controlplane")


def test_missing_and_excess_pool_rights_are_found() -> None:
    """Control: a missing role and a wildcard are found."""
    objects = build_with_components("pools")
    role = find(objects, "Role", "controlplane", NAMESPACE)
    role["rules"][0]["verbs"].append("*")
    assert list(rules.rights(objects)) == ["Role controlplane: a wildcard"]
    objects.remove(role)
    assert list(rules.rights(objects)) == ["RoleBinding controlplane: no such role"]


def test_a_pod_that_waits_is_meant() -> None:
    """The rendered pool is in that namespace, its policies select it, and its secret exists."""
    objects = build_with_components("pools", "certificates", "pools-certificates")
    cluster_settings = settings(objects)
    (spec,) = cluster_settings.pools.pools
    made = render_pool_service(spec, cluster_settings.pods, 1 << 30)
    template = made["spec"]["template"]
    assert (
        made["metadata"]["namespace"]
        == find(objects, "Namespace", require_dns_label(NAMESPACE, "namespace"))["metadata"]["name"]
    )
    assert template["metadata"]["labels"] == PARKED.labels
    (port,) = _orders(objects)["spec"]["ingress"][0]["ports"]
    assert port["port"] == cluster_settings.pools.port
    mounted = {each["secret"]["secretName"] for each in template["spec"]["volumes"] if "secret" in each}
    assert mounted == {find(objects, "Certificate", "kelvin-inner-runtime", NAMESPACE)["spec"]["secretName"]}


def test_what_a_pod_that_waits_mounts_is_asked_for() -> None:
    """The docs name each secret and ConfigMap that the namespace needs. Without one no pod starts."""
    cluster_settings = settings(build_with_components("pools", "verify"))
    volumes = render_pool_service(cluster_settings.pools.pools[0], cluster_settings.pods, 1 << 30)["spec"]["template"][
        "spec"
    ]["volumes"]
    named = {each["secret"]["secretName"] for each in volumes if "secret" in each}
    named |= {each["configMap"]["name"] for each in volumes if "configMap" in each}
    assert named == {"kelvin-inner-runtime", "kelvin-trust"}
    words = PAGE.partition("**Parked pods** ")[2].partition("\n\n")[0]
    assert all(f"`{each}`" in words for each in named)


def _kept(objects: list[Json], namespace: str) -> dict[str, Json]:
    policies = (each for each in objects if each["kind"] == "NetworkPolicy")
    return {each["metadata"]["name"]: each["spec"] for each in policies if each["metadata"]["namespace"] == namespace}


def test_pool_namespace_is_closed_like_a_tenants() -> None:
    """It has a tenant's policies and the one for control requests. It stays closed if a component opens a tenant's
    namespace.
    """
    objects = build_with_components("pools")
    tenants, pools = (_kept(objects, each) for each in ("kelvin-default", NAMESPACE))
    assert pools.pop("orders")
    assert pools == tenants
    labels = find(objects, "Namespace", "kelvin-default")["metadata"]["labels"]
    assert labels.pop("kelvin.dev/tenant") == "default"
    for also in ((), ("cache-agent",)):
        assert find(build_with_components("pools", *also), "Namespace", NAMESPACE)["metadata"]["labels"] == labels


def test_what_others_add() -> None:
    """Parked pods reach the trial's store if `pools` comes first, and the mesh with `pools-mesh`."""
    assert may(build_with_components("pools", "trial"), PARKED, S3, 9000)
    assert not may(build_with_components("trial", "pools"), PARKED, S3, 9000)
    meshed = build_with_components("pools", "mesh", "pools-mesh")
    assert may(meshed, PARKED, ISTIOD, 15012)
    assert not may(build_with_components("pools", "mesh"), PARKED, ISTIOD, 15012)
    peers = find(meshed, "PeerAuthentication", "runtimes", NAMESPACE)["spec"]
    assert peers["mtls"]["mode"] == "STRICT"
    assert peers["portLevelMtls"] == {port: {"mode": "PERMISSIVE"} for port in ("8012", str(LISTEN_PORT))}
    assert find(meshed, "Namespace", NAMESPACE)["metadata"]["labels"]["istio-injection"] == "enabled"
