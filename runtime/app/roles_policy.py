"""Which of our processes may ask a runtime for what, from another host."""

from typing import Final

from kelvin.contracts.roles import Role, Rules

_CONTROLPLANE: Final = frozenset({Role.CONTROLPLANE})

# Of a pod that waits for a version. What it serves then comes by the way of all pods.
BIND_API_RULES: Final[Rules] = {"/control": _CONTROLPLANE}

RULES: Final[Rules] = {
    "/v1": frozenset({Role.ACTIVATOR}),
    "/v2": frozenset({Role.ACTIVATOR}),
    "/control": _CONTROLPLANE,
    "/metrics": _CONTROLPLANE,
    "/healthz": frozenset(Role),
    "/readyz": frozenset(Role),
}
