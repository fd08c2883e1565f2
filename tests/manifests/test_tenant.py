"""A tenant's namespace: `kelvin cluster tenant` prints what the manifests have for `default`."""

import json

import pytest
from click.testing import CliRunner

from controlplane.knative.policy.namespace_requirements import (
    NamespaceRequirements,
    ObservedNamespace,
    denies_all,
    find_missing,
    opens_replicas,
    render_namespace,
)
from kelvin.cli.main import main
from tests.manifests import rules
from tests.manifests.component_effects import renders
from tests.manifests.kustomize_build import MANIFESTS, Json, build_with_components, find, kustomize, of_base
from tests.manifests.network_reach import Pod, may
from tests.manifests.schemas import problems
from tests.manifests.test_network_reach import ACTIVATOR, CONTROLPLANE, OUTSIDE, REPLICA, RUNTIME, SNAPSHOTTER, STRANGER

ACME = Pod("kelvin-acme", RUNTIME)


def printed(*more: str, tenant: str = "acme") -> tuple[list[Json], str]:
    """Return the printed objects and the text on stderr."""
    done = CliRunner().invoke(main, ["cluster", "tenant", tenant, *more])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["items"], done.stderr


def lacks(objects: list[Json], tenant: str, needs: NamespaceRequirements) -> tuple[str, ...]:
    """Return what the control plane would find missing in a namespace with these objects."""
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    seen = ObservedNamespace(
        find(objects, "Namespace", f"kelvin-{tenant}")["metadata"]["labels"],
        any(map(denies_all, policies)),
        any(map(opens_replicas, policies)),
        may_write=any(each["kind"] == "RoleBinding" for each in objects),
        absent=(),
    )
    return find_missing(tenant, needs, seen)


def test_manifests_and_command_agree() -> None:
    """The base's tenant has the same objects."""
    base = of_base()
    for made in render_namespace("default", NamespaceRequirements.of(renders(base)), "kelvin"):
        (there,) = [
            each
            for each in base
            if each["kind"] == made["kind"]
            and each["metadata"]["name"] == made["metadata"]["name"]
            and each["metadata"].get("namespace") == made["metadata"].get("namespace")
        ]
        assert there == made


def test_a_printed_namespace_is_complete() -> None:
    """Nothing is missing. Without any one of the objects something is."""
    objects, _ = printed()
    needs = NamespaceRequirements.of(renders(of_base()))
    assert [each for obj in objects for each in problems(obj)] == []
    assert lacks(objects, "acme", needs) == ()
    for left_out in objects[1:]:
        assert lacks([each for each in objects if each is not left_out], "acme", needs) != (), left_out["kind"]


def test_a_printed_namespace_is_closed() -> None:
    """Activators reach its replicas. Other tenants' pods do not, nor do its replicas reach them."""
    objects = [*of_base(), *printed()[0]]
    assert may(objects, ACTIVATOR, ACME, 8012)
    assert may(objects, ACME, CONTROLPLANE, 7500)
    assert may(objects, ACME, SNAPSHOTTER, 7501)
    for source, target in ((STRANGER, ACME), (REPLICA, ACME), (ACME, REPLICA)):
        assert not may(objects, source, target, 8012)


def test_a_printed_namespace_lets_the_store_s_port_through() -> None:
    """The port is the URL's, or its scheme's default."""
    for url, port in (
        ("s3://ours/versions", 443),
        ("s3://ours/versions?endpoint=https://s3.example.com", 443),
        ("s3://ours/versions?endpoint=http://s3.example.com", 80),
        ("s3://ours/versions?endpoint=http://s3.example.com:9000", 9000),
    ):
        objects, _ = printed("--store", url)
        assert [each for each in (80, 443, 9000) if may(objects, ACME, OUTSIDE, each)] == [port]


def test_secrets_are_named_and_not_printed() -> None:
    """They are named on stderr. A secret that pods do not need is left out."""
    objects, stderr = printed("--trust", "kelvin-trust")
    assert {each["kind"] for each in objects} == {"Namespace", "NetworkPolicy", "RoleBinding"}
    assert "kelvin-acme" in stderr
    for name in ("secret kelvin-inner-runtime", "secret kelvin-store", "config map kelvin-trust"):
        assert name in stderr
    assert "kelvin-store" not in printed("--store-secret", "")[1]


def test_rights_are_the_tenant_s_namespace_s() -> None:
    """The binding gives the control plane a role of the base in that namespace, and breaks no rule."""
    base, (*_, binding) = of_base(), printed()[0]
    assert binding["metadata"]["namespace"] == "kelvin-acme"
    assert find(base, "ClusterRole", binding["roleRef"]["name"])
    assert list(rules.rights([*base, binding])) == []


def test_what_pods_mount_may_be_looked_for() -> None:
    """The role allows reading the secrets that the settings name, and no others."""
    base = of_base()
    role = find(base, "ClusterRole", "kelvin-tenant")
    named = {name for rule in role["rules"] if rule["resources"] == ["secrets"] for name in rule["resourceNames"]}
    assert named == set(NamespaceRequirements.of(renders(base)).secrets)


@pytest.mark.skipif(kustomize() is None, reason="no kustomize 5: kubectl 1.27 or later has it")
def test_a_cache_on_the_node() -> None:
    """With `--node-cache` the namespace has the labels of the component."""
    objects, _ = printed("--node-cache", tenant="default")
    labels = find(objects, "Namespace", "kelvin-default")["metadata"]["labels"]
    there = find(build_with_components("cache-agent"), "Namespace", "kelvin-default")["metadata"]["labels"]
    enforce = "pod-security.kubernetes.io/enforce"
    assert labels[enforce] == there[enforce] == "privileged"
    assert MANIFESTS.is_dir()


def test_a_name_that_is_no_tenant_s_is_refused() -> None:
    """Nothing is printed."""
    done = CliRunner().invoke(main, ["cluster", "tenant", "-pools"])
    assert (done.exit_code, done.stdout) == (2, "")
