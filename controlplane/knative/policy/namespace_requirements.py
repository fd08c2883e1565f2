"""Decide whether a tenant's namespace has all that its versions need, and render such a namespace. Pure.

An operator creates the namespace: the control plane may neither create one nor give itself rights in it.
`render_namespace` returns the objects that an operator applies, and `find_missing` names what a namespace lacks.
`knative/services/tenant_namespaces.py` watches the cluster.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from controlplane.knative.policy.knative_service import ClusterSpec, parse_cluster_store
from controlplane.knative.policy.object_labels import PART_OF, RUNTIME, TENANT
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.setting_parser import BadSetting
from kelvin.contracts.traffic_errors import StartFailed

Json = dict[str, Any]

ENFORCE: Final = "pod-security.kubernetes.io/enforce"
RESTRICTED: Final = "restricted"
TENANT_ROLE: Final = "kelvin-tenant"  # the control plane's ClusterRole, bound in each tenant's namespace
ACCOUNT: Final = "controlplane"
STORE_PORT: Final = 443
# Deleting a namespace deletes its secrets, which are nowhere else. These keep tools from pruning it.
KEEP_ANNOTATIONS: Final = {
    "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
    "helm.sh/resource-policy": "keep",
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
}
_NO_NAMESPACE: Final = "the namespace itself"
_RBAC: Final = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class NamespaceRequirements:
    """Contents that each tenant's namespace needs: secrets and config maps by name, and a Pod Security level."""

    secrets: tuple[str, ...] = ()
    config_maps: tuple[str, ...] = ()
    pod_security: str = RESTRICTED

    @classmethod
    def of(cls, cluster: ClusterSpec) -> "NamespaceRequirements":
        """Return the requirements of pods that are rendered for this cluster."""
        secrets = [] if cluster.control is None else [cluster.control.secret]
        secrets += [] if cluster.secret is None else [cluster.secret]
        # A stricter level refuses pods that mount a directory of their node.
        level = RESTRICTED if cluster.cache is None else "privileged"
        return cls(tuple(secrets), () if cluster.trust is None else (cluster.trust,), level)


@dataclass(frozen=True, slots=True)
class ObservedNamespace:
    """A namespace as the cluster shows it."""

    labels: Mapping[str, str] | None  # None: there is no such namespace
    denies_all: bool  # some NetworkPolicy denies all traffic by default
    opens_replicas: bool  # some NetworkPolicy admits requests to replicas
    may_write: bool  # the control plane has rights in it; without them `absent` is unknown and empty
    absent: tuple[str, ...]  # required secrets and config maps that don't exist


def find_missing(tenant: str, requirements: NamespaceRequirements, observed: ObservedNamespace) -> tuple[str, ...]:
    """Return what the namespace lacks, in words; nothing if versions can run there.

    An empty tenant stands for the namespace of pooled pods, which mount no directory of their node.
    """
    level = requirements.pod_security if tenant else RESTRICTED
    if observed.labels is None:
        return (_NO_NAMESPACE,)
    found = []
    if tenant and observed.labels.get(TENANT) != tenant:
        found.append(f"the label {TENANT}={tenant}")
    if observed.labels.get(ENFORCE) != level:
        found.append(f"the label {ENFORCE}={level}")
    if not observed.denies_all:
        found.append("a NetworkPolicy that denies all traffic")
    if not observed.opens_replicas:
        found.append("a NetworkPolicy that admits requests to replicas")
    if not observed.may_write:
        found.append(f"a RoleBinding to the ClusterRole {TENANT_ROLE}")
    return (*found, *observed.absent)


def missing_failure(namespace: str, tenant: str, lacking: Iterable[str]) -> StartFailed:
    """Return the failure of starts in a namespace that lacks these."""
    lacking = tuple(lacking)
    is_equipment = all(each.startswith(("the secret ", "the config map ")) for each in lacking)
    problem = "does not exist" if lacking == (_NO_NAMESPACE,) else f"lacks {', '.join(lacking)}"
    if is_equipment:
        # `kelvin cluster tenant` prints neither secrets nor config maps. Run without its earlier options, it would
        # print other objects than those that exist.
        return StartFailed(
            f"the namespace {namespace} {problem}; an operator has to create what is missing", "missing_secret"
        )
    source = f"what `kelvin cluster tenant {tenant}` prints" if tenant else "`manifests/components/pools`"
    return StartFailed(f"the namespace {namespace} {problem}; an operator has to apply {source}", "refused_object")


def denies_all(policy: Mapping[str, Any]) -> bool:
    """Return whether a NetworkPolicy denies all traffic by default, in both directions."""
    spec = policy.get("spec") or {}
    chooses_all = not any((spec.get("podSelector") or {}).values())
    kinds = set(spec.get("policyTypes") or ("Ingress",))
    return chooses_all and kinds == {"Ingress", "Egress"} and not spec.get("ingress") and not spec.get("egress")


def opens_replicas(policy: Mapping[str, Any]) -> bool:
    """Return whether a NetworkPolicy selects replicas and admits some ingress."""
    spec = policy.get("spec") or {}
    selector = spec.get("podSelector") or {}
    labels = selector.get("matchLabels") or {}
    return labels.items() <= RUNTIME.items() and not selector.get("matchExpressions") and bool(spec.get("ingress"))


def store_port(url: str | None) -> int:
    """Return the port of a store's URL; 443 if it names none. Raises Refused(InvalidRequest), without any secret."""
    try:
        endpoint = urlsplit((parse_cluster_store(url).endpoint or "") if url else "")
    except BadSetting as bad:
        raise Refused(InvalidRequest("store", bad.shown_value, bad.rule)) from None
    return endpoint.port or (80 if endpoint.scheme == "http" else STORE_PORT)


def render_namespace(
    tenant: str, requirements: NamespaceRequirements, installation: str, store_port: int = STORE_PORT
) -> list[Json]:
    """Return a tenant's namespace and all objects in it but its secrets. Raises Refused.

    `manifests/tenant` holds the same objects for the tenant `default`.
    """
    namespace, level = require_dns_label(f"kelvin-{tenant}", "namespace"), requirements.pod_security
    labels = {**PART_OF, TENANT: tenant}
    warned = {} if level == "privileged" else {"pod-security.kubernetes.io/warn": level}
    security = {ENFORCE: level, f"{ENFORCE}-version": "latest", **warned}
    metadata = {"name": namespace, "labels": {**labels, **security}, "annotations": KEEP_ANNOTATIONS}

    def head(api_version: str, kind: str, name: str) -> Json:
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace, "labels": PART_OF},
        }

    closed = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    binding = {
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": TENANT_ROLE},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": installation}],
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
        {**head("networking.k8s.io/v1", "NetworkPolicy", "nobody"), "spec": closed},
        {**head("networking.k8s.io/v1", "NetworkPolicy", "runtimes"), "spec": _runtimes(installation, store_port)},
        {**head(f"{_RBAC}/v1", "RoleBinding", "controlplane"), **binding},
    ]


def _runtimes(installation: str, store_port: int) -> Json:
    """Admit activators and Knative to replicas, and let replicas reach DNS, Kelvin's services and the store."""
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
