"""Which of our processes may ask the control plane for what, from another host. What is not here is for its socket."""

from typing import Final

from kelvin.contracts.roles import Role, Rules

_ACTIVATOR: Final = frozenset({Role.ACTIVATOR})
_SNAPSHOTTER: Final = frozenset({Role.SNAPSHOTTER})

RULES: Final[Rules] = {
    "/internal/v1/feed": _ACTIVATOR,
    "/internal/v1/stats": _ACTIVATOR,
    "/internal/v1/keys/uses": _ACTIVATOR,
    "/internal/v1/requests": _ACTIVATOR,  # their timelines
    "/internal/v1/usage/requests": frozenset({Role.ACTIVATOR, Role.RUNTIME}),
    "/internal/v1/usage/lifetimes": frozenset({Role.RUNTIME}),  # of a pod, by what keeps it
    "/internal/v1/usage/lives": frozenset({Role.RUNTIME}),
    "/admin/v1": _ACTIVATOR,  # which says for whom
    "/internal/v1/versions": _SNAPSHOTTER,
    "/internal/v1/jobs": _SNAPSHOTTER,
    "/internal/v1/tenants": _SNAPSHOTTER,  # what they may store
    "/healthz": frozenset(Role),
    "/readyz": frozenset(Role),
}
SOCKET_ONLY_PATHS: Final = frozenset({"/internal/v1/backup"})  # it holds the installation's secrets
