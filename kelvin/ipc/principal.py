"""Read the caller of an internal service from the header that the activator sets after authentication.

Our sockets trust this header.
"""

from collections.abc import Callable
from typing import Final

from starlette.requests import Request

from kelvin.contracts.errors import Forbidden, Refused, Unauthenticated
from kelvin.contracts.serving.control_messages import Principal, Scope, scope_allows
from kelvin.contracts.wire import decode

PRINCIPAL_HEADER: Final = "x-kelvin-principal"


def principal_of(request: Request) -> Principal:
    """Return the caller. Raises Refused: Unauthenticated without the header, InvalidRequest if it does not decode."""
    raw = request.headers.get(PRINCIPAL_HEADER)
    if raw is None:
        raise Refused(Unauthenticated())
    return decode(raw, Principal, field=PRINCIPAL_HEADER)


def require_scope(scope: Scope) -> Callable[[Request], Principal]:
    """Return a FastAPI dependency that returns the caller, whose key must allow `scope`. It raises Refused(Forbidden),
    and what `principal_of` raises.
    """

    def holder(request: Request) -> Principal:
        principal = principal_of(request)
        if not scope_allows(principal.scopes, scope):
            raise Refused(Forbidden(scope))
        return principal

    return holder


require_admin = require_scope(Scope.ADMIN)
