"""The roles that may call each route of a runtime from another host."""

from typing import Final

from kelvin.contracts.roles import Role, Rules

_CONTROLPLANE: Final = frozenset({Role.CONTROLPLANE})

# For the orders to a parked pod. Once it serves a version, requests use the rules of all pods.
BIND_API_RULES: Final[Rules] = {"/control": _CONTROLPLANE}

RULES: Final[Rules] = {
    "/v1": frozenset({Role.ACTIVATOR}),
    "/v2": frozenset({Role.ACTIVATOR}),
    "/control": _CONTROLPLANE,
    "/metrics": _CONTROLPLANE,
    "/healthz": frozenset(Role),
    "/readyz": frozenset(Role),
}
