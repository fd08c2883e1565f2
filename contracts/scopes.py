"""Which scopes a key needs, and which it brings: the only place that knows what includes what. Pure."""

from collections.abc import Collection
from typing import Final

from contracts.control import Scope

_OF_ADMIN: Final = frozenset((Scope.PUSH, Scope.BILLING_READ))
# An operator makes keys of any kind, so that to leave them less would only look like it.
_INCLUDES: Final = {Scope.ADMIN: _OF_ADMIN, Scope.OPERATOR: _OF_ADMIN | {Scope.ADMIN}}


def allows(held: Collection[Scope], wanted: Scope) -> bool:
    """Whether a key with the scopes `held` may do what needs `wanted`."""
    return wanted in held or any(wanted in _INCLUDES.get(scope, ()) for scope in held)
