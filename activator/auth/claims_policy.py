"""Read a token's claims, and decide which principal it names. Signatures are checked in `oidc.py`.

Tokens are JSON Web Tokens (RFC 7519) in compact form, read as RFC 8725 demands. The issuer's settings decide the
algorithms and the key set, never the token. `kid` is only a name in that set. Headers that bring their own keys (`jwk`,
`jku`, `x5u`, `x5c`) are ignored, and a token with critical headers (`crit`) is refused.
"""

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeGuard

from kelvin.contracts.serving.control_messages import Principal, Scope
from kelvin.contracts.wire import decoder

MAX_NAME: Final = 255  # characters of `kid`, `sub`
ID_HEX: Final = 11  # with its prefix as long as an API key's id
_COMPACT: Final = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")
_TYPES: Final = frozenset((None, "jwt", "at+jwt", "application/jwt", "application/at+jwt"))


@dataclass(frozen=True, slots=True)
class Issuer:
    """A trusted issuer, and the limits of its tokens. None of this ever comes from a token."""

    name: str  # `iss`, compared exactly
    audience: str
    algorithms: frozenset[str]
    tenant_claim: str
    tenants: frozenset[str]  # tenants that its tokens may name
    scopes: tuple[Scope, ...]  # upper bound of a token's scopes
    scope_claim: str | None = None  # the claim with a token's scopes; None: it has all of `scopes`
    leeway_s: float = 30.0  # tolerated clock difference


@dataclass(frozen=True, slots=True)
class Token:
    """A parsed token. Nothing in it has been verified."""

    kid: str
    algorithm: str
    claims: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Identity:
    """The principal that a token names, and the token's expiry (seconds since 1970)."""

    principal: Principal
    expires_at_s: float


class TokenRefusal(StrEnum):
    """Why a token is refused. Shown in metrics, not to callers."""

    FORM = "form"
    ISSUER = "issuer"
    ALGORITHM = "algorithm"
    KEY = "key"
    SIGNATURE = "signature"
    AUDIENCE = "audience"
    EXPIRED = "expired"
    EARLY = "early"
    SUBJECT = "subject"
    TENANT = "tenant"


def parse_token(text: str) -> Token | None:
    """Parse a token, or return None if it has an unsupported form. The caller bounds the length of `text`."""
    parts = _COMPACT.fullmatch(text)
    if parts is None:
        return None
    header, claims = _decode_object(parts[1]), _decode_object(parts[2])
    if header is None or claims is None or not {"crit", "b64"}.isdisjoint(header):
        return None
    kid, algorithm, kind = header.get("kid"), header.get("alg"), header.get("typ")
    if not _is_name(kid) or not isinstance(algorithm, str) or not isinstance(kind, str | None):
        return None
    return Token(kid, algorithm, claims) if (kind and kind.lower()) in _TYPES else None


def verify_claims(token: Token, issuer: Issuer, now_s: float) -> Identity | TokenRefusal:
    """Return the identity that a correctly signed token names, or the first reason to refuse it. `now_s` is
    Unix time.
    """
    claims, leeway_s = token.claims, issuer.leeway_s
    if claims.get("iss") != issuer.name:
        return TokenRefusal.ISSUER
    if token.algorithm not in issuer.algorithms:
        return TokenRefusal.ALGORITHM
    audience = claims.get("aud")
    if issuer.audience not in (audience if isinstance(audience, list) else [audience]):
        return TokenRefusal.AUDIENCE
    expires_s = _numeric_date(claims.get("exp"))
    if expires_s is None or now_s >= expires_s + leeway_s:
        return TokenRefusal.EXPIRED
    for name in ("nbf", "iat"):
        if name in claims and ((from_s := _numeric_date(claims[name])) is None or from_s > now_s + leeway_s):
            return TokenRefusal.EARLY
    subject, tenant = claims.get("sub"), claims.get(issuer.tenant_claim)
    if not _is_name(subject):
        return TokenRefusal.SUBJECT
    if not isinstance(tenant, str) or tenant not in issuer.tenants:
        return TokenRefusal.TENANT
    principal = Principal(key_id=derive_key_id(issuer.name, subject), tenant=tenant, scopes=_scopes(claims, issuer))
    return Identity(principal, expires_s)


def derive_key_id(issuer: str, subject: str) -> str:
    """Return the id that replaces a key's id in records and audit: `j` and 44 bits of SHA-256 of both names."""
    return "j" + hashlib.sha256(f"{issuer}\0{subject}".encode()).hexdigest()[:ID_HEX]


def _scopes(claims: Mapping[str, object], issuer: Issuer) -> tuple[Scope, ...]:
    """Return the token's scopes (space-separated, RFC 8693, 4.2, or a list) within the issuer's; never `operator`."""
    allowed = [scope for scope in issuer.scopes if scope is not Scope.OPERATOR]
    if issuer.scope_claim is None:
        return tuple(allowed)
    claimed = claims.get(issuer.scope_claim)
    claimed_names = claimed.split(" ") if isinstance(claimed, str) else claimed if isinstance(claimed, list) else []
    return tuple(scope for scope in allowed if scope.value in claimed_names)


def _decode_object(part: str) -> dict[str, object] | None:
    """Decode a JSON object in base64url without padding (RFC 7515, 2), or return None."""
    try:
        return decoder(dict[str, object]).decode(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, RecursionError):  # msgspec and base64 raise subclasses of ValueError
        return None


def _numeric_date(value: object) -> float | None:
    """Return a NumericDate (RFC 7519, 2) in seconds, or None if it is invalid."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return seconds if math.isfinite(seconds) else None


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME
