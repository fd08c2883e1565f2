"""What our own processes are to one another between hosts: a role in each certificate, and what each role may ask."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

MAX_PATH_DEPTH: Final = 6  # segments of a path that rules look at


class Role(StrEnum):
    """What a process is. Its certificate says so in a URI (SAN): the installation's prefix, then this."""

    CONTROLPLANE = "controlplane"
    ACTIVATOR = "activator"
    RUNTIME = "runtime"
    SNAPSHOTTER = "snapshotter"
    AGENT = "agent"


# By path: who may ask for it, and for all below it that has no rule of its own. What has none is asked by nobody.
Rules = Mapping[str, frozenset[Role]]


def role_of(uris: Collection[str], prefix: str) -> Role | None:
    """The role that a certificate with these URIs is for; None where it names none of this installation, or several."""
    named = [uri for uri in uris if uri.startswith(prefix)]
    if len(named) != 1:
        return None
    try:
        return Role(named[0][len(prefix) :])
    except ValueError:
        return None


def role_may_call(rules: Rules, role: Role, path: str) -> bool:
    """The nearest rule decides: the path's own, else that of what it is below. `path` is as the router will see it."""
    parts = path.split("/", MAX_PATH_DEPTH + 1)[: MAX_PATH_DEPTH + 1]
    for length in range(len(parts), 1, -1):
        if (roles := rules.get("/".join(parts[:length]))) is not None:
            return role in roles
    return False
