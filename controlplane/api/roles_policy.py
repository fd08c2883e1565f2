"""List which roles may call which routes of the control plane from other hosts. All others are for its socket only."""

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
    "/internal/v1/usage/lifetimes": frozenset({Role.RUNTIME}),  # of a pod's replica, sent by the pod's main process
    "/internal/v1/usage/lives": frozenset({Role.RUNTIME}),
    "/admin/v1": _ACTIVATOR,  # it authenticates the caller, and sends the principal along
    "/internal/v1/versions": _SNAPSHOTTER,
    "/internal/v1/jobs": _SNAPSHOTTER,
    "/internal/v1/tenants": _SNAPSHOTTER,  # their storage limits
    "/healthz": frozenset(Role),
    "/readyz": frozenset(Role),
}
SOCKET_ONLY_PATHS: Final = frozenset({"/internal/v1/backup"})  # it holds the installation's secrets
