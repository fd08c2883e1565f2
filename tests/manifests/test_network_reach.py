"""The network policies allow what the product needs, and nothing between tenants or around the front door."""

import copy

import pytest

from tests.manifests.kustomize_build import find, plain
from tests.manifests.network_reach import Pod, may, without_rules

RUNTIME = {"app.kubernetes.io/managed-by": "kelvin", "app.kubernetes.io/component": "runtime"}


def _ours(name: str) -> Pod:
    return Pod("kelvin", {"app.kubernetes.io/name": name})


ACTIVATOR, CONTROLPLANE, SNAPSHOTTER = _ours("activator"), _ours("controlplane"), _ours("snapshotter")
REPLICA, OTHER = Pod("kelvin-default", RUNTIME), Pod("kelvin-default", {"app": "miner"})
STRANGER, OUTSIDE = Pod("elsewhere", {"app.kubernetes.io/name": "activator"}), Pod(None)
NAMES = Pod("kube-system", {"k8s-app": "kube-dns"})
KNATIVE = {name: Pod("knative-serving", {"app": name}) for name in ("activator", "autoscaler", "controller")}


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        pytest.param(OUTSIDE, ACTIVATOR, 8443, id="any client, at the front door"),
        pytest.param(STRANGER, ACTIVATOR, 8443, id="a pod of the cluster, at the front door"),
        pytest.param(ACTIVATOR, CONTROLPLANE, 7500, id="the feed and admin calls"),
        pytest.param(ACTIVATOR, SNAPSHOTTER, 7501, id="pushes"),
        pytest.param(SNAPSHOTTER, CONTROLPLANE, 7500, id="versions, jobs"),
        pytest.param(ACTIVATOR, REPLICA, 8012, id="requests, through queue-proxy"),
        pytest.param(ACTIVATOR, KNATIVE["autoscaler"], 8080, id="concurrency reports"),
        pytest.param(KNATIVE["activator"], REPLICA, 8012, id="probes of Knative's activator"),
        pytest.param(KNATIVE["autoscaler"], REPLICA, 9090, id="queue-proxy's figures"),
        pytest.param(REPLICA, CONTROLPLANE, 7500, id="usage records of a replica"),
        pytest.param(REPLICA, SNAPSHOTTER, 7501, id="seals"),
        pytest.param(ACTIVATOR, NAMES, 53, id="DNS"),
        pytest.param(REPLICA, NAMES, 53, id="DNS, from a replica"),
        pytest.param(ACTIVATOR, OUTSIDE, 6379, id="Redis"),
        pytest.param(CONTROLPLANE, OUTSIDE, 5432, id="PostgreSQL"),
        pytest.param(CONTROLPLANE, OUTSIDE, 6443, id="the API server"),
        pytest.param(SNAPSHOTTER, OUTSIDE, 443, id="the store"),
        pytest.param(REPLICA, OUTSIDE, 443, id="the store, from a replica"),
    ],
)
def test_what_is_needed(source: Pod, target: Pod, port: int) -> None:
    """The connection is allowed. Control: without the rules it is not."""
    objects = plain()
    assert may(objects, source, target, port)
    assert not may(without_rules(objects), source, target, port)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        pytest.param(OUTSIDE, CONTROLPLANE, 7500, id="an outside client, to the control plane"),
        pytest.param(STRANGER, CONTROLPLANE, 7500, id="a foreign pod with the activator's label"),
        pytest.param(OTHER, CONTROLPLANE, 7500, id="another pod of a tenant"),
        pytest.param(STRANGER, ACTIVATOR, 7480, id="a foreign pod, to the metrics"),
        pytest.param(ACTIVATOR, CONTROLPLANE, 5432, id="another port"),
        pytest.param(ACTIVATOR, OUTSIDE, 5432, id="the activator, to the database"),
        pytest.param(ACTIVATOR, OUTSIDE, 6443, id="the activator, to the API server"),
        pytest.param(SNAPSHOTTER, OUTSIDE, 6443, id="the snapshotter, to the API server"),
        pytest.param(SNAPSHOTTER, ACTIVATOR, 8080, id="the snapshotter, to the activator"),
        pytest.param(REPLICA, OUTSIDE, 5432, id="a replica, to the database"),
        pytest.param(REPLICA, OUTSIDE, 6443, id="a replica, to the API server"),
        pytest.param(REPLICA, REPLICA, 8012, id="a replica, to another"),
        pytest.param(Pod("kelvin-acme", RUNTIME), REPLICA, 8012, id="another tenant's replica"),
        pytest.param(OTHER, REPLICA, 8012, id="another pod of the tenant, to a replica"),
        pytest.param(STRANGER, REPLICA, 8012, id="around the front door"),
        pytest.param(KNATIVE["controller"], REPLICA, 8012, id="Knative's controller"),
        pytest.param(ACTIVATOR, REPLICA, 8080, id="past queue-proxy"),
        pytest.param(OTHER, OUTSIDE, 443, id="another pod of a tenant, to anywhere"),
    ],
)
def test_what_is_refused(source: Pod, target: Pod, port: int) -> None:
    """The connection is refused. Control: without the policies it is allowed."""
    objects = plain()
    assert not may(objects, source, target, port)
    assert may([], source, target, port)


def test_a_namespace_that_says_nothing_is_open() -> None:
    """The deny-all policy closes a namespace. Without it the tests above fail."""
    objects = copy.deepcopy(plain())
    assert not may(objects, OTHER, OUTSIDE, 443)
    objects.remove(find(objects, "NetworkPolicy", "nobody", "kelvin-default"))
    assert may(objects, OTHER, OUTSIDE, 443)
