"""A request's key to the one who holds it. What the key's holder may do with a model is the routes' matter."""

from activator.table import Table
from contracts.control import Principal, Scope
from contracts.errors import Forbidden, Refused, Unauthenticated

MAX_KEY = 512


def authenticate(table: Table, authorization: bytes | None, scope: Scope) -> Principal:
    """`Authorization: Bearer KEY` (RFC 6750, 2.1). Raises Refused: Unauthenticated, Forbidden."""
    scheme, _, key = (authorization or b"").strip().partition(b" ")
    if scheme.lower() != b"bearer" or len(key) > MAX_KEY:
        raise Refused(Unauthenticated())
    principal = table.principal(key.strip().decode("latin-1"))
    if principal is None:
        raise Refused(Unauthenticated())
    if scope not in principal.scopes:
        raise Refused(Forbidden(scope))
    return principal
