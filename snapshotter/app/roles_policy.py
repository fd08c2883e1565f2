"""Which of our processes may ask the snapshotter for what, from another host."""

from typing import Final

from kelvin.contracts.roles import Role, Rules

RULES: Final[Rules] = {
    "/push/v1": frozenset({Role.ACTIVATOR}),  # which says for whom
    "/internal/v1/seals": frozenset({Role.RUNTIME}),
    "/healthz": frozenset(Role),
    "/readyz": frozenset(Role),
}
