"""Which algorithms each key of a key set may verify."""

from typing import Any

import pytest

from activator.auth.key_set_policy import KINDS, MAX_KEYS, usable_keys

RSA: dict[str, Any] = {"kid": "k", "kty": "RSA", "n": "n", "e": "AQAB"}
EC: dict[str, Any] = {"kid": "k", "kty": "EC", "crv": "P-256", "x": "x", "y": "y"}
ALL = frozenset(KINDS)


@pytest.mark.parametrize(
    ("key", "want"),
    [
        pytest.param(RSA, {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}, id="an RSA key has six algorithms"),
        pytest.param(RSA | {"alg": "PS256"}, {"PS256"}, id="an RSA key with an algorithm has one"),
        pytest.param(EC, {"ES256"}, id="a P-256 key has one"),
        pytest.param(EC | {"crv": "P-521"}, {"ES512"}, id="a P-521 key has another"),
        pytest.param(EC | {"crv": "secp256k1"}, set(), id="an unsupported curve"),
        pytest.param(EC | {"alg": "RS256"}, set(), id="a curve with an RSA algorithm"),
        pytest.param({"kid": "k", "kty": "OKP", "crv": "Ed25519", "x": "x"}, {"EdDSA"}, id="Ed25519"),
        pytest.param({"kid": "k", "kty": "oct", "k": "s3cret"}, set(), id="a shared secret"),
        pytest.param(
            {"kid": "k", "kty": "oct", "k": "s", "alg": "RS256"}, set(), id="a shared secret with an RSA algorithm"
        ),
        pytest.param(RSA | {"use": "enc"}, set(), id="for encryption"),
        pytest.param(RSA | {"key_ops": ["sign"]}, set(), id="not for verifying"),
        pytest.param(RSA | {"kid": None}, set(), id="a null kid"),
        pytest.param({"kty": "RSA", "n": "n", "e": "e"}, set(), id="no kid"),
        pytest.param("k", set(), id="not an object"),
    ],
)
def test_key_verifies_only_its_own_algorithms(key: object, want: set[str]) -> None:
    assert {algorithm for _, algorithm in usable_keys({"keys": [key]}, ALL)} == want


def test_only_the_issuers_algorithms_are_usable() -> None:
    """A key is usable for the issuer's algorithms only."""
    assert set(usable_keys({"keys": [RSA, EC]}, frozenset({"RS512"}))) == {("k", "RS512")}


def test_private_key_parts_are_dropped() -> None:
    """An issuer may publish private parts by mistake."""
    (found,) = usable_keys({"keys": [EC | {"d": "secret"}]}, ALL).values()
    assert found == {"kty": "EC", "crv": "P-256", "x": "x", "y": "y"}


def test_first_of_two_keys_with_one_kid_wins() -> None:
    found = usable_keys({"keys": [EC, EC | {"x": "other"}]}, ALL)
    assert found[("k", "ES256")]["x"] == "x"


@pytest.mark.parametrize("document", [None, [], "keys", {}, {"keys": {}}, {"keys": [EC] * (MAX_KEYS + 1)}])
def test_malformed_key_set_is_refused(document: object) -> None:
    """The whole key set is refused, so that the last good one stays."""
    with pytest.raises(ValueError, match="keys"):
        usable_keys(document, ALL)
