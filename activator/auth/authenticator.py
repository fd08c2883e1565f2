"""Find the principal that holds a request's API key or token. Routes decide what the principal may do.

A valid key is accepted whatever its address did before, because other callers behind that address must not suffer from
a guesser. Unknown, expired and revoked keys get the same response. The more of them an address shows, the later they
are answered (`http/failed_auth_policy.py`). The same holds for signed tokens (`oidc.py`), if the operator trusts an
issuer.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Never

from activator.auth.key_uses import KeyUses
from activator.auth.oidc import MAX_TOKEN, TokenVerifier
from activator.http.exchange import Exchange
from activator.http.failed_auth_policy import FailedAuthLimiter, Penalty, source_of
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.errors import Forbidden, Refused, TenantSuspended, Unauthenticated, Unavailable
from kelvin.contracts.serving.control_messages import Principal, Scope, scope_allows
from kelvin.contracts.traffic_errors import TooManyFailures

log = logging.getLogger(__name__)

MAX_KEY = 512


class Authenticator:
    """Checks credentials against the routing table, and delays failures."""

    def __init__(
        self,
        table: RoutingTable,
        uses: KeyUses,
        tokens: TokenVerifier | None = None,
        failed_auth_limiter: FailedAuthLimiter | None = None,
        *,
        is_fresh: Callable[[], bool] = lambda: True,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._uses = uses
        self._tokens = tokens
        self._failed_auth_limiter = failed_auth_limiter or FailedAuthLimiter()
        self._is_fresh = is_fresh
        self._wall_clock = wall_clock

    def __repr__(self) -> str:
        return f"<Authenticator {self._failed_auth_limiter!r}>"

    async def authenticate(self, exchange: Exchange, scope: Scope, *other_scopes: Scope) -> Principal:
        """Return the caller, whose key or token has one of these scopes. Raises Refused, ClientGone.

        Failures: Unauthenticated, TooManyFailures; for valid credentials TenantSuspended, Forbidden; Unavailable if the
        feed has not arrived or is too old, or if an issuer's keys can't be fetched.
        """
        if not self._table.revision or not self._is_fresh():  # a valid key could look unknown, a revoked one valid
            raise Refused(Unavailable("the table of keys"))
        authorization = exchange.header(b"authorization")
        now_s = self._wall_clock()
        principal = find_key_holder(self._table, authorization, now_s)
        if principal is not None:
            self._uses.record_use(principal.key_id, now_s)
        elif authorization is None:  # without credentials, nothing was guessed
            raise Refused(Unauthenticated())
        else:
            principal = await self._find_token_holder(authorization)
            if principal is None:
                await self._refuse(exchange)
        if self._table.is_suspended(principal.tenant):
            raise Refused(TenantSuspended())
        if any(scope_allows(principal.scopes, each) for each in (scope, *other_scopes)):
            return principal
        raise Refused(Forbidden(scope, other_scopes))

    async def _find_token_holder(self, authorization: bytes) -> Principal | None:
        """Return the principal that a signed token names, if its tenant exists."""
        if self._tokens is None or (token := parse_bearer(authorization, MAX_TOKEN)) is None or token.count(".") != 2:
            return None
        principal = await self._tokens.find_principal(token)
        return principal if principal is not None and self._table.has_tenant(principal.tenant) else None

    async def _refuse(self, exchange: Exchange) -> Never:
        source = source_of(exchange.peer)
        penalty = self._failed_auth_limiter.record_failure(source, time.monotonic())
        if penalty is None:
            raise Refused(Unauthenticated())
        await self._hold(exchange, source, penalty)
        raise Refused(TooManyFailures(penalty.retry_after_s))

    async def _hold(self, exchange: Exchange, source: str, penalty: Penalty) -> None:
        """Delay the response. A client that leaves frees its place. Without a place, close the connection instead."""
        if penalty.is_first:
            log.warning("an address shows many keys that are not good", extra={"source": source})
        if not self._failed_auth_limiter.try_hold(source):
            exchange.closes_connection = True
            return
        try:
            with exchange.cancel_on_disconnect():
                await asyncio.sleep(penalty.hold_s)
        finally:
            self._failed_auth_limiter.release_hold(source)


def find_key_holder(table: RoutingTable, authorization: bytes | None, now_s: float) -> Principal | None:
    """Return the holder of the API key, or None if the key is missing or invalid."""
    key = parse_bearer(authorization, MAX_KEY)
    return None if key is None else table.principal(key, now_s)


def parse_bearer(authorization: bytes | None, max_bytes: int) -> str | None:
    """Return the credential in `Authorization: Bearer ...` (RFC 6750, 2.1), or None if it exceeds `max_bytes` bytes."""
    scheme, _, borne = (authorization or b"").strip().partition(b" ")
    return None if scheme.lower() != b"bearer" or len(borne) > max_bytes else borne.strip().decode("latin-1")
