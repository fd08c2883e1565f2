"""Who calls an inner service: the activator authenticated them and says so in a header that our sockets trust."""

from typing import Final

from starlette.requests import Request

from contracts.control import Principal, Scope
from contracts.errors import Forbidden, Refused, Unauthenticated
from contracts.wire import decode

HEADER: Final = "x-kelvin-principal"


def principal_of(request: Request) -> Principal:
    """The caller. Raises Refused(Unauthenticated) without the header, InvalidRequest where it does not decode."""
    raw = request.headers.get(HEADER)
    if raw is None:
        raise Refused(Unauthenticated())
    return decode(raw, Principal, what=HEADER)


def admin_of(request: Request) -> Principal:
    """The caller, who may administer their tenant. Usable as a FastAPI dependency. Raises Refused(Forbidden)."""
    principal = principal_of(request)
    if Scope.ADMIN not in principal.scopes:
        raise Refused(Forbidden(Scope.ADMIN))
    return principal
