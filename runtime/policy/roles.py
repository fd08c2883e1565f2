"""Which of our processes may ask a runtime for what, from another host."""

from typing import Final

from contracts.roles import Role, Rules

_CONTROLPLANE: Final = frozenset({Role.CONTROLPLANE})

RULES: Final[Rules] = {
    "/v1": frozenset({Role.ACTIVATOR}),
    "/control": _CONTROLPLANE,
    "/metrics": _CONTROLPLANE,
    "/healthz": frozenset(Role),
    "/readyz": frozenset(Role),
}
