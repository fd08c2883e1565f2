"""Roles of Kelvin processes between hosts: each certificate has one role, and rules say which paths a role may call."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

MAX_PATH_DEPTH: Final = 6  # path segments that rules are compared with


class Role(StrEnum):
    """The role of a process. Its certificate has it in a SAN URI: the installation's prefix, then the role."""

    CONTROLPLANE = "controlplane"
    ACTIVATOR = "activator"
    RUNTIME = "runtime"
    SNAPSHOTTER = "snapshotter"
    AGENT = "agent"


# By path: the roles that may call it and all paths below it without a rule of their own. Other paths are refused.
Rules = Mapping[str, frozenset[Role]]


def role_of(uris: Collection[str], prefix: str) -> Role | None:
    """Return the role in a certificate with these URIs. None if it has no role of this installation, or several."""
    named = [uri for uri in uris if uri.startswith(prefix)]
    if len(named) != 1:
        return None
    try:
        return Role(named[0][len(prefix) :])
    except ValueError:
        return None


def role_may_call(rules: Rules, role: Role, path: str) -> bool:
    """Return whether the role may call the path. The rule of the path itself or of its nearest ancestor decides. `path`
    must be in the form that the router will see.
    """
    parts = path.split("/", MAX_PATH_DEPTH + 1)[: MAX_PATH_DEPTH + 1]
    for length in range(len(parts), 1, -1):
        if (roles := rules.get("/".join(parts[:length]))) is not None:
            return role in roles
    return False
