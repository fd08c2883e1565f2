"""Embedding requests are decoded strictly, and answered in OpenAI's form."""

import base64
import json
import struct
from typing import Any

import pytest

from kelvin.contracts.errors import Failure, Internal, InvalidRequest, LimitExceeded, Refused
from kelvin.contracts.serving.stream_frames import Counts
from runtime.drivers.interface import Embedded, Event, Failed, Finished
from runtime.surface.openai_embeddings import EmbeddingAnswerBuilder, EmbeddingCall, Format, decode_embeddings

RULE = "must be a text or token ids, and not empty"


@pytest.mark.parametrize(
    ("body", "want"),
    [
        pytest.param({"input": "a"}, EmbeddingCall(("a",), None, "float"), id="a text"),
        pytest.param({"input": ["a", "b"]}, EmbeddingCall(("a", "b"), None, "float"), id="texts"),
        pytest.param({"input": [1, 2]}, EmbeddingCall(((1, 2),), None, "float"), id="token ids"),
        pytest.param({"input": [[1], [2, 3]]}, EmbeddingCall(((1,), (2, 3)), None, "float"), id="lists of token ids"),
        pytest.param(
            {"input": "a", "model": "m", "encoding_format": "base64", "dimensions": 4, "user": "u"},
            EmbeddingCall(("a",), "m", "base64"),
            id="all fields",
        ),
    ],
)
def test_decoded(body: dict[str, Any], want: EmbeddingCall) -> None:
    assert decode_embeddings(json.dumps(body).encode(), 4) == want


@pytest.mark.parametrize(
    ("body", "want"),
    [
        pytest.param({}, InvalidRequest("input", "(missing)", "is required"), id="no input"),
        pytest.param({"input": ""}, InvalidRequest("input", '""', RULE), id="an empty text"),
        pytest.param({"input": []}, InvalidRequest("input", "[]", "must hold a text"), id="an empty list"),
        pytest.param({"input": ["a", ""]}, InvalidRequest("input[1]", '""', RULE), id="an empty text among others"),
        pytest.param({"input": ["a", [1]]}, None, id="texts and token ids may mix"),
        pytest.param({"input": [1, "a"]}, InvalidRequest("input[0]", "1", RULE), id="neither"),
        pytest.param({"input": [[True]]}, InvalidRequest("input[0]", "[true]", RULE), id="a boolean is no id"),
        pytest.param({"input": [[]]}, InvalidRequest("input[0]", "[]", RULE), id="no ids"),
        pytest.param(
            {"input": "a", "dimensions": 3},
            InvalidRequest("dimensions", "3", "this model's embeddings have 4"),
            id="other dimensions",
        ),
        pytest.param({"input": ["a"] * 513}, LimitExceeded("input", 513, 512, "inputs"), id="too many"),
    ],
)
def test_refused(body: dict[str, Any], want: Failure | None) -> None:
    """The refusal names field, value and rule."""
    if want is None:
        decode_embeddings(json.dumps(body).encode(), 4)
        return
    with pytest.raises(Refused) as caught:
        decode_embeddings(json.dumps(body).encode(), 4)
    assert caught.value.failure == want


def test_wide_embeddings_are_fewer() -> None:
    """An answer must fit in one frame in the longest form of its numbers."""
    with pytest.raises(Refused) as caught:
        decode_embeddings(json.dumps({"input": ["a"] * 200}).encode(), 4096)
    assert caught.value.failure == LimitExceeded("input", 200, 170, "inputs")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(Refused, match="encoding_format"):
        decode_embeddings(b'{"input": "a", "encoding_format": "hex"}', 4)


VECTORS = [(1.5, -0.25), (3.0, 1e-30)]


def played(form: Format, cuts: list[int]) -> bytes:
    """Return the answer to two inputs, with its events in pieces."""
    answer = EmbeddingAnswerBuilder("m", form)
    events: list[Event] = [
        Embedded("r", struct.pack("<2f", *vector), Counts(prompt_tokens=3 * (at + 1)))
        for at, vector in enumerate(VECTORS)
    ]
    events.append(Finished("r", "stop", Counts(prompt_tokens=6)))
    data = b""
    for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True):
        progress = answer.add_events(events[start:end])
        data += progress.data
    assert progress.reason == "stop"
    return data


@pytest.mark.parametrize("cuts", [[], [1], [1, 2], [2]])
def test_rendered(cuts: list[int]) -> None:
    """The answer is one object however its events are grouped, with the exact float32 values."""
    found = json.loads(played("float", cuts))
    assert found["object"] == "list"
    assert found["model"] == "m"
    assert found["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert [item["index"] for item in found["data"]] == [0, 1]
    for item, vector in zip(found["data"], VECTORS, strict=True):
        assert struct.pack("<2f", *item["embedding"]) == struct.pack("<2f", *vector)
    coded = json.loads(played("base64", cuts))
    assert [base64.b64decode(item["embedding"]) for item in coded["data"]] == [
        struct.pack("<2f", *vector) for vector in VECTORS
    ]


def test_a_failure_is_told() -> None:
    progress = EmbeddingAnswerBuilder("m", "float").add_events([Failed("r", Internal(), Counts(prompt_tokens=1))])
    assert progress.failure == Internal()
    assert progress.counts.prompt_tokens == 1
