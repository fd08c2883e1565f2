"""The namespace of a tenant on a cluster: what it has to hold before a version may run there.

An operator makes it, because the control plane may neither make namespaces nor give itself rights in one. `rendered`
gives the objects that an operator applies, and `gaps` names what a namespace still lacks. Looking at the cluster is
`tenant_spaces`' work.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from contracts.errors import InvalidRequest, Refused
from contracts.names import dns_label
from contracts.traffic_errors import StartFailed
from controlplane.policy.knative_service import Cluster
from controlplane.policy.labels import PART_OF, RUNTIME, TENANT

Json = dict[str, Any]

ENFORCE: Final = "pod-security.kubernetes.io/enforce"
RESTRICTED: Final = "restricted"
RIGHTS: Final = "kelvin-tenant"  # the ClusterRole that a tenant's namespace binds to the control plane
ACCOUNT: Final = "controlplane"
STORE_PORT: Final = 443
# With a namespace go its secrets, and they are nowhere else: no tool deletes it because it is no longer rendered.
KEPT: Final = {
    "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
    "helm.sh/resource-policy": "keep",
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
}
_RBAC: Final = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class Needs:
    """What every tenant's namespace has to hold: names of secrets and config maps, and how far pods are restricted."""

    secrets: tuple[str, ...] = ()
    config_maps: tuple[str, ...] = ()
    pod_security: str = RESTRICTED

    @classmethod
    def of(cls, cluster: Cluster) -> "Needs":
        """Return what pods rendered for this cluster need."""
        secrets = [] if cluster.control is None else [cluster.control.secret]
        secrets += [] if cluster.secret is None else [cluster.secret]
        # Pods that mount a directory of their node are refused by any stricter level.
        level = RESTRICTED if cluster.cache is None else "privileged"
        return cls(tuple(secrets), () if cluster.trust is None else (cluster.trust,), level)


@dataclass(frozen=True, slots=True)
class Seen:
    """A namespace as the cluster shows it. `absent` are needed objects that are not there.

    `may_write` is False where the control plane has no rights in the namespace: then nobody knows what is absent.
    """

    labels: Mapping[str, str] | None  # None: there is no such namespace
    is_closed: bool
    lets_runtimes_speak: bool
    may_write: bool
    absent: tuple[str, ...]


def gaps(tenant: str, needs: Needs, seen: Seen) -> tuple[str, ...]:
    """Return what the namespace lacks, each in words; nothing where a version may run there.

    No tenant: it is that of pods that wait for versions. Those mount no directory of their node.
    """
    level = needs.pod_security if tenant else RESTRICTED
    if seen.labels is None:
        return ("the namespace itself",)
    found = []
    if tenant and seen.labels.get(TENANT) != tenant:
        found.append(f"the label {TENANT}={tenant}")
    if seen.labels.get(ENFORCE) != level:
        found.append(f"the label {ENFORCE}={level}")
    if not seen.is_closed:
        found.append("a NetworkPolicy that closes it")
    if not seen.lets_runtimes_speak:
        found.append("a NetworkPolicy that lets replicas be asked")
    if not seen.may_write:
        found.append(f"a RoleBinding to the ClusterRole {RIGHTS}")
    return (*found, *seen.absent)


def failure(namespace: str, tenant: str, lacking: Iterable[str]) -> StartFailed:
    """Return the failure of versions whose namespace lacks that."""
    lacking = tuple(lacking)
    is_equipment = all(each.startswith(("the secret ", "the config map ")) for each in lacking)
    how = f"an operator has to apply what `kelvin cluster tenant {tenant}` prints" if tenant else "see components/pools"
    why = f"the namespace {namespace} lacks {', '.join(lacking)}; {how}"
    return StartFailed(why, "missing_secret" if is_equipment else "refused_object")


def closes(policy: Mapping[str, Any]) -> bool:
    """Return whether a NetworkPolicy refuses all that no other one lets through, in both directions."""
    spec = policy.get("spec") or {}
    chooses_all = not any((spec.get("podSelector") or {}).values())
    kinds = set(spec.get("policyTypes") or ("Ingress",))
    return chooses_all and kinds == {"Ingress", "Egress"} and not spec.get("ingress") and not spec.get("egress")


def lets_runtimes_speak(policy: Mapping[str, Any]) -> bool:
    """Return whether a NetworkPolicy chooses replicas, and lets something reach them."""
    spec = policy.get("spec") or {}
    selector = spec.get("podSelector") or {}
    chosen = selector.get("matchLabels") or {}
    return chosen.items() <= RUNTIME.items() and not selector.get("matchExpressions") and bool(spec.get("ingress"))


def store_port(url: str | None) -> int:
    """Return the port at which pods reach a store, by its URL. Raises `Refused(InvalidRequest)`."""
    try:
        endpoint = dict(parse_qsl(urlsplit(url or "").query)).get("endpoint", "")
        parts = urlsplit(endpoint)
        return parts.port or (80 if parts.scheme == "http" else STORE_PORT)
    except ValueError as error:
        raise Refused(InvalidRequest("store", str(url)[:80], str(error))) from error


def rendered(tenant: str, needs: Needs, installation: str, store_port: int = STORE_PORT) -> list[Json]:
    """Return the objects that a tenant's namespace consists of, its secrets left out. Raises `Refused`.

    `manifests/tenant` holds the same objects for the tenant `default`.
    """
    namespace, level = dns_label(f"kelvin-{tenant}", "namespace"), needs.pod_security
    labels = {**PART_OF, TENANT: tenant}
    warned = {} if level == "privileged" else {"pod-security.kubernetes.io/warn": level}
    security = {ENFORCE: level, f"{ENFORCE}-version": "latest", **warned}
    about = {"name": namespace, "labels": {**labels, **security}, "annotations": KEPT}

    def head(api_version: str, kind: str, name: str) -> Json:
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace, "labels": PART_OF},
        }

    closed = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    binding = {
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": RIGHTS},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": installation}],
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": about},
        {**head("networking.k8s.io/v1", "NetworkPolicy", "nobody"), "spec": closed},
        {**head("networking.k8s.io/v1", "NetworkPolicy", "runtimes"), "spec": _runtimes(installation, store_port)},
        {**head(f"{_RBAC}/v1", "RoleBinding", "controlplane"), **binding},
    ]


def _runtimes(installation: str, store_port: int) -> Json:
    """Replicas are asked by activators, and by Knative about themselves. No other tenant's pod reaches them."""
    return {
        "podSelector": {"matchLabels": dict(RUNTIME)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {
                "from": [
                    _pods(installation, {"app.kubernetes.io/name": "activator"}),
                    _pods("knative-serving", {"app": "activator"}),
                ],
                "ports": _ports(8012),
            },
            {"from": [_pods("knative-serving", {"app": "autoscaler"})], "ports": _ports(8012, 9090)},
        ],
        "egress": [
            {
                "to": [_pods("kube-system", {"k8s-app": "kube-dns"})],
                "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
            },
            {"to": [_pods(installation, {"app.kubernetes.io/name": "controlplane"})], "ports": _ports(7500)},
            {"to": [_pods(installation, {"app.kubernetes.io/name": "snapshotter"})], "ports": _ports(7501)},
            {"ports": _ports(store_port)},
        ],
    }


def _pods(namespace: str, labels: Mapping[str, str]) -> Json:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": dict(labels)},
    }


def _ports(*numbers: int) -> list[Json]:
    return [{"protocol": "TCP", "port": number} for number in numbers]
