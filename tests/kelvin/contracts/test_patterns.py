"""Patterns match the whole name: a newline after it is refused."""

import msgspec
import pytest

from kelvin.contracts.artifacts.attestation import KeyId
from kelvin.contracts.artifacts.manifest import Digest
from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.serving.degradation_steps import PlanName

HEX = "0f" * 32


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        pytest.param(Digest, HEX, id="a digest"),
        pytest.param(KeyId, f"ed25519:{HEX}", id="a key"),
        pytest.param(PlanName, "gold", id="a plan"),
    ],
)
@pytest.mark.parametrize("end", ["\n", " ", "\r\n", "\0"])
def test_patterns_refuse_a_trailing_newline(kind: object, good: str, end: str) -> None:
    """Python's `$` would also match before a trailing newline."""
    assert msgspec.convert(good, kind) == good
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good + end, kind)


def test_schema_hash_refuses_a_trailing_newline() -> None:
    body = {"inputs": [], "outputs": [], "schema_hash": HEX}
    assert msgspec.convert(body, Signature).schema_hash == HEX
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**body, "schema_hash": f"{HEX}\n"}, Signature)
