"""Evaluate network policies as Kubernetes does.

A pod that no policy selects is open. A selected pod accepts only what one of its policies allows. Both ends must allow
a connection.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """One end of a connection. Without a namespace it is outside of the cluster, where no policy applies."""

    namespace: str | None
    labels: Mapping[str, str] = field(default_factory=dict)


def may(objects: list[Json], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Return whether the policies allow a connection to that port."""
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    return _lets(policies, source, target, "Egress", port, protocol) and _lets(
        policies, target, source, "Ingress", port, protocol
    )


def without_rules(objects: list[Json]) -> list[Json]:
    """Remove all rules from the policies, so that they allow nothing."""
    for each in objects:
        if each["kind"] == "NetworkPolicy":
            each["spec"].pop("ingress", None)
            each["spec"].pop("egress", None)
    return objects


def _lets(policies: list[Json], own: Pod, other: Pod, way: str, port: int, protocol: str) -> bool:
    chosen = [
        each["spec"]
        for each in policies
        if each["metadata"]["namespace"] == own.namespace
        and _is(each["spec"]["podSelector"], own.labels)
        and way in each["spec"]["policyTypes"]
    ]
    if not chosen:
        return True
    key, side = way.lower(), "to" if way == "Egress" else "from"
    return any(
        _at(rule.get("ports"), port, protocol)
        and (side not in rule or any(_is_one(one, own, other) for one in rule[side]))
        for spec in chosen
        for rule in spec.get(key, ())
    )


def _at(ports: list[Json] | None, port: int, protocol: str) -> bool:
    return ports is None or any((each["protocol"], each["port"]) == (protocol, port) for each in ports)


def _is_one(peer: Json, own: Pod, other: Pod) -> bool:
    """Return whether the peer rule matches. An ipBlock never matches a pod of the cluster."""
    if other.namespace is None:
        return "ipBlock" in peer
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        if not _is(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace}):
            return False
    elif own.namespace != other.namespace:
        return False
    return _is(peer.get("podSelector", {}), other.labels)


def _is(selector: Json, labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
