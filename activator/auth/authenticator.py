"""A request's key to the one who holds it. What the key's holder may do with a model is the routes' matter.

A good key is looked up and let through, whatever its address did before: others behind the same address must not pay
for a guesser. A bad one is answered alike whether it is unknown, expired or revoked, and the more of them an address
shows, the later (`failed_auth_policy`). So is a signed token (`oidc`), where the operator trusts an issuer of such.
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
    """Knows the table, whether it still counts, and what it costs to be wrong."""

    def __init__(
        self,
        table: RoutingTable,
        uses: KeyUses,
        tokens: TokenVerifier | None = None,
        failed_auth_limiter: FailedAuthLimiter | None = None,
        *,
        is_fresh: Callable[[], bool] = lambda: True,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._uses = uses
        self._tokens = tokens
        self._guesses = failed_auth_limiter or FailedAuthLimiter()
        self._is_fresh = is_fresh
        self._wall_s = wall_s

    def __repr__(self) -> str:
        return f"<Authenticator {self._guesses!r}>"

    async def authenticate(self, exchange: Exchange, scope: Scope, *others: Scope) -> Principal:
        """Who calls, with a key or token for one of these scopes. Raises Refused, ClientGone.

        Unauthenticated, TooManyFailures; TenantSuspended, Forbidden for a good one; Unavailable before the feed and
        once it is too old, and where an issuer's keys can't be had.
        """
        if not self._table.revision or not self._is_fresh():  # every key would look wrong, or a revoked one good
            raise Refused(Unavailable("the table of keys"))
        authorization = exchange.header(b"authorization")
        now_s = self._wall_s()
        principal = find(self._table, authorization, now_s)
        if principal is not None:
            self._uses.note(principal.key_id, now_s)
        elif authorization is None:  # nothing was guessed
            raise Refused(Unauthenticated())
        else:
            principal = await self._of_token(authorization)
            if principal is None:
                await self._refuse(exchange)
        if self._table.is_suspended(principal.tenant):
            raise Refused(TenantSuspended())
        if any(scope_allows(principal.scopes, each) for each in (scope, *others)):
            return principal
        raise Refused(Forbidden(scope, others))

    async def _of_token(self, authorization: bytes) -> Principal | None:
        """Whom a signed token names, where that tenant is there."""
        if self._tokens is None or (token := bearer(authorization, MAX_TOKEN)) is None or token.count(".") != 2:
            return None
        principal = await self._tokens.principal(token)
        return principal if principal is not None and self._table.has_tenant(principal.tenant) else None

    async def _refuse(self, exchange: Exchange) -> Never:
        source = source_of(exchange.peer)
        penalty = self._guesses.failed(source, time.monotonic())
        if penalty is None:
            raise Refused(Unauthenticated())
        await self._hold(exchange, source, penalty)
        raise Refused(TooManyFailures(penalty.retry_after_s))

    async def _hold(self, exchange: Exchange, source: str, penalty: Penalty) -> None:
        """Until the time is over; a client that leaves gives its place back. Without a place the connection ends."""
        if penalty.is_first:
            log.warning("an address shows many keys that are not good", extra={"source": source})
        if not self._guesses.try_hold(source):
            exchange.closes_connection = True
            return
        try:
            with exchange.cancel_on_disconnect():
                await asyncio.sleep(penalty.hold_s)
        finally:
            self._guesses.release_hold(source)


def find(table: RoutingTable, authorization: bytes | None, now_s: float) -> Principal | None:
    """Whose key it is; None for everything that is no good one."""
    key = bearer(authorization, MAX_KEY)
    return None if key is None else table.principal(key, now_s)


def bearer(authorization: bytes | None, most: int) -> str | None:
    """What `Authorization: Bearer …` bears (RFC 6750, 2.1), where that is not more than `most` bytes."""
    scheme, _, borne = (authorization or b"").strip().partition(b" ")
    return None if scheme.lower() != b"bearer" or len(borne) > most else borne.strip().decode("latin-1")
