"""Request bodies become sequences for an encoder's engine."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.errors import LimitExceeded, Refused
from runtime.encoder.served_encoder import ServedEncoder
from tests.runtime.fakes import BIND

LIMITS = Limits(max_input_tokens=1000, max_output_tokens=1, max_streams=8, max_body_bytes=100_000)
UNUSED: Any = None


@pytest.mark.parametrize(
    ("inputs", "encoded"),
    [
        pytest.param(["a" * 10, "a" * 1001], 1011, id="by its tokens: it and those before it"),
        pytest.param(["a" * 10, "a" * 5000], 10, id="by its characters: those before it"),
        pytest.param([[1] * 10, [1] * 1001], 0, id="tokens by their ids"),
    ],
)
def test_refusal_of_a_long_input_counts_what_was_encoded(inputs: list[Any], encoded: int) -> None:
    """A refusal reports the encoded tokens for the tenant's rate limit. One character is one token here."""
    codec: Any = SimpleNamespace(longest_token_characters=1, encode=lambda text: (1,) * len(text))
    serving = ServedEncoder(bind=BIND, limits=LIMITS, codec=codec, dimensions=2, engine=UNUSED, thread=UNUSED, spans=())
    with pytest.raises(Refused) as caught:
        asyncio.run(serving.prepare("/v1/embeddings", json.dumps({"input": inputs}).encode(), "r", 0))
    assert isinstance(caught.value.failure, LimitExceeded)
    assert caught.value.encoded_tokens == encoded
