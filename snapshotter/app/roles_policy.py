"""The roles that may call each route of the snapshotter from another host."""

from typing import Final

from kelvin.contracts.roles import Role, Rules

RULES: Final[Rules] = {
    "/push/v1": frozenset({Role.ACTIVATOR}),  # the activator adds the caller's tenant
    "/internal/v1/seals": frozenset({Role.RUNTIME}),
    "/healthz": frozenset(Role),
    "/readyz": frozenset(Role),
}
