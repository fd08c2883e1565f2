"""Untrusted JSON is measured before it is decoded."""

import json

import pytest

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.strict_json import parse_object

BOMBS = {
    "lists": b'{"a":[' + b"[]," * (4 << 20) + b"[]]}",
    "objects": b'{"a":[' + b"{}," * (4 << 20) + b"{}]}",
    "numbers": b'{"a":[' + b"1," * (8 << 20) + b"1]}",
    "members": b'{"a":{' + b'"":1,' * (2 << 20) + b'"x":1}}',
}


@pytest.mark.parametrize("raw", [pytest.param(raw, id=name) for name, raw in BOMBS.items()])
def test_values_that_would_take_too_much_memory_are_refused(raw: bytes) -> None:
    """A few megabytes of punctuation would take half a gigabyte of objects."""
    with pytest.raises(Refused) as refused:
        parse_object(raw, "tokenizer.json")
    failure = refused.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert "MiB of memory" in failure.reason


def test_the_largest_tokenizers_in_use_are_read() -> None:
    """A vocabulary of 262,144 tokens with 524,288 merges is accepted."""
    vocab = {f"token {at:06d}": at for at in range(262_144)}
    merges = [[f"token{at:06d}", "x"] for at in range(524_288)]
    raw = json.dumps({"model": {"vocab": vocab, "merges": merges}}).encode()
    assert parse_object(raw, "tokenizer.json").keys() == {"model"}
