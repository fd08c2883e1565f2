"""Fuzz targets for tokens and key sets, honest or forged."""

import base64
from typing import Any, Final

import msgspec

from activator.auth.claims_policy import Identity, Issuer, TokenRefusal, parse_token, verify_claims
from activator.auth.key_set_policy import KINDS, MAX_KEYS, Jwk, KeyName, usable_keys
from kelvin.contracts.serving.control_messages import Scope
from tests.fuzz.mutations import change_json
from tests.fuzz.oracle import FuzzTarget

NOW_S: Final = 1_800_000_000.0
ISSUER: Final = Issuer(
    name="i", audience="a", algorithms=frozenset({"RS256"}), tenant_claim="t", tenants=frozenset({"acme"}),
    scopes=(Scope.INFER,), scope_claim="s",
)  # fmt: skip
TOKEN: Final = {
    "header": {"alg": "RS256", "kid": "k", "typ": "JWT"},
    "claims": {"iss": "i", "aud": ["a"], "exp": NOW_S + 9, "nbf": NOW_S, "iat": NOW_S, "sub": "s", "jti": "1",
               "t": "acme", "s": "infer push operator"},
}  # fmt: skip
KEYS: Final = {
    "keys": [
        {"kid": "r", "kty": "RSA", "n": "AQAB", "e": "AQAB", "use": "sig", "alg": "RS256", "d": "AQAB"},
        {"kid": "e", "kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "key_ops": ["verify"]},
    ]
}


def _part(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _read(data: bytes) -> Identity | TokenRefusal | None:
    """Read and verify a token made of these two parts, or the bytes as they are."""
    try:
        parts = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parts = None
    if isinstance(parts, dict):
        text = ".".join(_part(msgspec.json.encode(parts.get(name))) for name in ("header", "claims")) + ".c2ln"
    else:
        text = data.decode("latin-1")
    token = parse_token(text)
    return None if token is None else verify_claims(token, ISSUER, NOW_S)


def _identity_holds(data: bytes, found: Identity | TokenRefusal | None) -> None:
    if isinstance(found, Identity):
        assert found.principal.tenant in ISSUER.tenants
        assert set(found.principal.scopes) <= set(ISSUER.scopes)
        assert NOW_S - ISSUER.leeway_s < found.expires_at_s < float("inf")


def _keys(data: bytes) -> dict[KeyName, Jwk]:
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return usable_keys(document, frozenset(KINDS))


def _keys_hold(data: bytes, found: dict[KeyName, Jwk]) -> None:
    assert len(found) <= MAX_KEYS * len(KINDS)
    for (kid, algorithm), jwk in found.items():
        assert isinstance(kid, str)
        assert jwk["kty"] == KINDS[algorithm][0]
        assert not {"d", "p", "q", "k"} & set(jwk)


def _json(value: Any) -> tuple[bytes, ...]:
    return (msgspec.json.encode(value),)


TARGETS: Final = (
    FuzzTarget("token", _read, (), _json(TOKEN), change_json, holds=_identity_holds),
    FuzzTarget("key-set", _keys, (ValueError,), _json(KEYS), change_json, holds=_keys_hold),
)
