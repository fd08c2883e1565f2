"""Which members of a key set may verify what, as a table."""

from typing import Any

import pytest

from activator.auth.key_set_policy import KINDS, MAX_KEYS, usable_keys

RSA: dict[str, Any] = {"kid": "k", "kty": "RSA", "n": "n", "e": "AQAB"}
EC: dict[str, Any] = {"kid": "k", "kty": "EC", "crv": "P-256", "x": "x", "y": "y"}
ALL = frozenset(KINDS)


@pytest.mark.parametrize(
    ("key", "want"),
    [
        pytest.param(RSA, {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}, id="RSA signs in six ways"),
        pytest.param(RSA | {"alg": "PS256"}, {"PS256"}, id="or in the one that it is for"),
        pytest.param(EC, {"ES256"}, id="a curve has one"),
        pytest.param(EC | {"crv": "P-521"}, {"ES512"}, id="another curve"),
        pytest.param(EC | {"crv": "secp256k1"}, set(), id="a curve that we don't take"),
        pytest.param(EC | {"alg": "RS256"}, set(), id="a contradiction"),
        pytest.param({"kid": "k", "kty": "OKP", "crv": "Ed25519", "x": "x"}, {"EdDSA"}, id="Ed25519"),
        pytest.param({"kid": "k", "kty": "oct", "k": "s3cret"}, set(), id="a shared secret"),
        pytest.param({"kid": "k", "kty": "oct", "k": "s", "alg": "RS256"}, set(), id="one that calls itself RSA"),
        pytest.param(RSA | {"use": "enc"}, set(), id="for encryption"),
        pytest.param(RSA | {"key_ops": ["sign"]}, set(), id="not for verifying"),
        pytest.param(RSA | {"kid": None}, set(), id="without a name"),
        pytest.param({"kty": "RSA", "n": "n", "e": "e"}, set(), id="likewise"),
        pytest.param("k", set(), id="no object"),
    ],
)
def test_key_verifies_only_its_own_algorithms(key: object, want: set[str]) -> None:
    """What it may verify."""
    assert {algorithm for _, algorithm in usable_keys({"keys": [key]}, ALL)} == want


def test_only_what_the_issuer_may_use() -> None:
    """However many ways a key knows."""
    assert set(usable_keys({"keys": [RSA, EC]}, frozenset({"RS512"}))) == {("k", "RS512")}


def test_private_key_parts_are_dropped() -> None:
    """An issuer that publishes it by mistake."""
    (found,) = usable_keys({"keys": [EC | {"d": "secret"}]}, ALL).values()
    assert found == {"kty": "EC", "crv": "P-256", "x": "x", "y": "y"}


def test_the_first_of_two_with_one_name() -> None:
    """A second one can't take its place."""
    found = usable_keys({"keys": [EC, EC | {"x": "other"}]}, ALL)
    assert found[("k", "ES256")]["x"] == "x"


@pytest.mark.parametrize("document", [None, [], "keys", {}, {"keys": {}}, {"keys": [EC] * (MAX_KEYS + 1)}])
def test_malformed_key_set_is_refused(document: object) -> None:
    """Is refused as a whole, so that the last one stands."""
    with pytest.raises(ValueError, match="keys"):
        usable_keys(document, ALL)
