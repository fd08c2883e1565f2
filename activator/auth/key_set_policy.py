"""Which keys of a JSON Web Key Set (RFC 7517) may verify which algorithm's signatures. Fetching it is `jwks`'s work."""

from collections.abc import Mapping
from typing import Final

MAX_KEYS: Final = 64
# An algorithm's kind of key (RFC 7518, 3.1 and RFC 8037, 3.1). Only such that sign with what nobody else needs to know:
# of an HMAC the verifier's key makes tokens as well.
KINDS: Final[Mapping[str, tuple[str, str | None]]] = {
    "RS256": ("RSA", None), "RS384": ("RSA", None), "RS512": ("RSA", None),
    "PS256": ("RSA", None), "PS384": ("RSA", None), "PS512": ("RSA", None),
    "ES256": ("EC", "P-256"), "ES384": ("EC", "P-384"), "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}  # fmt: skip
_PUBLIC: Final = ("kty", "crv", "n", "e", "x", "y")

Name = tuple[str, str]  # kid, algorithm
Jwk = Mapping[str, object]


def usable_keys(document: object, algorithms: frozenset[str]) -> dict[Name, Jwk]:
    """The public part of each key that has a name, is for signatures and fits an algorithm; of two with one name the
    first. Other members are passed over, as they may be of a later time. Raises ValueError for what is no key set.
    """
    keys = document.get("keys") if isinstance(document, Mapping) else None
    if not isinstance(keys, list) or len(keys) > MAX_KEYS:
        raise ValueError(f"must be an object with a list 'keys' of {MAX_KEYS} at most")
    found: dict[Name, Jwk] = {}
    for key in keys:
        if not isinstance(key, Mapping) or not isinstance(kid := key.get("kid"), str) or not _verifies(key):
            continue
        public = {name: key[name] for name in _PUBLIC if name in key}
        for algorithm in sorted(algorithms):
            if key.get("alg") in (None, algorithm) and _fits(key, algorithm):
                found.setdefault((kid, algorithm), public)
    return found


def _verifies(key: Jwk) -> bool:
    operations = key.get("key_ops")
    return key.get("use") in (None, "sig") and (operations is None or "verify" in _texts(operations))


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _fits(key: Jwk, algorithm: str) -> bool:
    kind, curve = KINDS[algorithm]
    return key.get("kty") == kind and (curve is None or key.get("crv") == curve)
