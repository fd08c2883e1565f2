"""Find the principal that a signed token names: parse it, check its claims, verify its signature.

Verified tokens are cached by digest until they expire, because verifying a signature blocks the event loop for 0.25 ms.
Two checks of a cached token are repeated: its expiry, without leeway, and whether its key still belongs to its issuer.
If one fails, the token is verified in full.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Final

import aiohttp
import jwt

from activator.auth.claims_policy import Issuer, Token, TokenRefusal, parse_token, verify_claims
from activator.auth.issuers import TrustedIssuer
from activator.auth.jwks import KeySet
from activator.auth.key_set_policy import KeyName
from kelvin.contracts.serving.control_messages import Principal
from kelvin.process.loops import Loops
from kelvin.telemetry.policy.instruments import MetricKind, MetricsPage

MAX_TOKEN: Final = 16 << 10
MAX_VERIFIED_TOKENS: Final = 4096  # size of the cache

_signatures: Final = jwt.PyJWS(options={"enforce_minimum_key_length": True})  # RSA of 2048 bits or more


@dataclass(frozen=True, slots=True)
class _Verified:
    """A verified token, and the key that verified it."""

    principal: Principal
    expires_at_s: float
    keys: KeySet
    name: KeyName
    key: jwt.PyJWK


class TokenVerifier:
    """Verifies tokens of the trusted issuers. Use from one event loop."""

    def __init__(
        self,
        issuers: Mapping[str, tuple[Issuer, KeySet]],
        page: MetricsPage,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._issuers = issuers
        self._wall_clock = wall_clock
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()  # least recently used first
        self._refused = page.counter(
            "kelvin_tokens_refused_total", "Signed tokens that were refused, by reason.", ("why",)
        )
        help = "Seconds since an issuer's keys were fetched."
        page.callback("kelvin_issuer_keys_age_seconds", help, MetricKind.GAUGE, ("issuer",), self._ages)

    def __repr__(self) -> str:
        return f"<TokenVerifier issuers={len(self._issuers)} verified={len(self._verified)}>"

    async def find_principal(self, text: str) -> Principal | None:
        """Return the principal that the token names, or None if it is invalid. Raises Refused(Unavailable) without
        keys.
        """
        digest, now_s = hashlib.sha256(text.encode()).digest(), self._wall_clock()
        if (cached := self._verified.get(digest)) is not None:
            if now_s < cached.expires_at_s and cached.keys.find_loaded(cached.name) is cached.key:
                self._verified.move_to_end(digest)
                return cached.principal
            del self._verified[digest]
        result = await self._verify(text, digest, now_s)
        if isinstance(result, TokenRefusal):
            self._refused.add((result.value,))
            return None
        return result

    async def run(self) -> None:
        """Fetch the keys of all issuers until cancelled."""
        async with Loops() as loops:
            for name, (_, keys) in self._issuers.items():
                # An issuer's document may be at fault. Callers with API keys, or of other issuers, are served.
                loops.start("issuer keys", keys.run, about=name, takes_readiness=False)
            await loops.wait()

    async def _verify(self, text: str, digest: bytes, now_s: float) -> Principal | TokenRefusal:
        """Verify a token, with the cheapest checks first. Nothing in it is trusted before its signature is verified."""
        if (token := parse_token(text)) is None:
            return TokenRefusal.FORM
        name = token.claims.get("iss")
        if not isinstance(name, str) or name not in self._issuers:
            return TokenRefusal.ISSUER
        issuer, keys = self._issuers[name]
        identity = verify_claims(token, issuer, now_s)
        if isinstance(identity, TokenRefusal):
            return identity
        key = await keys.find((token.kid, token.algorithm))
        if key is None:
            return TokenRefusal.KEY
        if not _is_signed(text, token, key):
            return TokenRefusal.SIGNATURE
        self._verified[digest] = _Verified(
            identity.principal, identity.expires_at_s, keys, (token.kid, token.algorithm), key
        )
        if len(self._verified) > MAX_VERIFIED_TOKENS:
            self._verified.popitem(last=False)
        return identity.principal

    def _ages(self) -> dict[tuple[str, ...], float]:
        ages = {(name,): keys.age_s() for name, (_, keys) in self._issuers.items()}
        return {labels: age_s for labels, age_s in ages.items() if isfinite(age_s)}


def _is_signed(text: str, token: Token, key: jwt.PyJWK) -> bool:
    try:
        _signatures.decode_complete(text, key, algorithms=[token.algorithm])
    # RecursionError: the library decodes the header once more, deeper in the stack.
    except (jwt.PyJWTError, ValueError, RecursionError):
        return False
    return True


@asynccontextmanager
async def open_token_verifier(
    trusted: Sequence[TrustedIssuer], page: MetricsPage
) -> AsyncIterator[TokenVerifier | None]:
    """Yield a verifier, or None without trusted issuers. Closes its HTTP session at the end."""
    if not trusted:
        yield None
        return
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        issuers = {
            each.issuer.name: (each.issuer, KeySet(session, each.source, each.issuer.algorithms)) for each in trusted
        }
        yield TokenVerifier(issuers, page)
