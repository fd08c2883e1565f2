"""Select the keys of a JSON Web Key Set (RFC 7517) that may verify signatures. `jwks.py` fetches the set."""

from collections.abc import Mapping
from typing import Final

MAX_KEYS: Final = 64
# Key type and curve per algorithm (RFC 7518, 3.1; RFC 8037, 3.1). No HMAC: its verifier could make tokens, too.
KINDS: Final[Mapping[str, tuple[str, str | None]]] = {
    "RS256": ("RSA", None), "RS384": ("RSA", None), "RS512": ("RSA", None),
    "PS256": ("RSA", None), "PS384": ("RSA", None), "PS512": ("RSA", None),
    "ES256": ("EC", "P-256"), "ES384": ("EC", "P-384"), "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}  # fmt: skip
_PUBLIC: Final = ("kty", "crv", "n", "e", "x", "y")

KeyName = tuple[str, str]  # kid, algorithm
Jwk = Mapping[str, object]


def usable_keys(document: object, algorithms: frozenset[str]) -> dict[KeyName, Jwk]:
    """Return the public part of each key that has a name, is for signatures and fits an algorithm.

    If two keys have one name, the first counts. Unknown members are ignored, since they may be newer than this code.
    Raises ValueError if the document is no key set.
    """
    keys = document.get("keys") if isinstance(document, Mapping) else None
    if not isinstance(keys, list) or len(keys) > MAX_KEYS:
        raise ValueError(f"must be an object with a list 'keys' of {MAX_KEYS} at most")
    usable: dict[KeyName, Jwk] = {}
    for key in keys:
        if not isinstance(key, Mapping) or not isinstance(kid := key.get("kid"), str) or not _verifies(key):
            continue
        public = {name: key[name] for name in _PUBLIC if name in key}
        for algorithm in sorted(algorithms):
            if key.get("alg") in (None, algorithm) and _fits(key, algorithm):
                usable.setdefault((kid, algorithm), public)
    return usable


def _verifies(key: Jwk) -> bool:
    operations = key.get("key_ops")
    return key.get("use") in (None, "sig") and (operations is None or "verify" in _texts(operations))


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _fits(key: Jwk, algorithm: str) -> bool:
    kind, curve = KINDS[algorithm]
    return key.get("kty") == kind and (curve is None or key.get("crv") == curve)
