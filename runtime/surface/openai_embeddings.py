"""OpenAI's embeddings: decode requests strictly, render responses. Pure."""

import base64
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from kelvin.contracts.errors import LimitExceeded, Refused
from kelvin.contracts.serving.stream_frames import MAX_PAYLOAD, Counts
from runtime.drivers.interface import Cancelled, Embedded, Event, Failed, Finished, Generated, Predicted
from runtime.surface.answer_builder import AnswerProgress
from runtime.surface.openai_requests import convert_request, field_refusal, parse_openai_body

Format = Literal["float", "base64"]
MAX_INPUTS: Final = 512
_NUMBER_BYTES: Final = 24  # the longest text of a float32, with its comma


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[Any]
    model: str | None = None
    encoding_format: Format | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """A decoded request: texts or token ids, each of which becomes a vector."""

    inputs: tuple[str | tuple[int, ...], ...]
    model: str | None
    vector_format: Format


def decode_embeddings(raw: bytes, dimensions: int) -> EmbeddingCall:
    """Decode a `POST /v1/embeddings` for that many dimensions. Raises `Refused`: InvalidRequest, LimitExceeded."""
    request = convert_request(parse_openai_body(raw), _Request)
    if request.dimensions not in (None, dimensions):
        raise field_refusal("dimensions", request.dimensions, f"this model's embeddings have {dimensions}")
    inputs = _inputs(request.input)
    max_inputs = min(MAX_INPUTS, MAX_PAYLOAD // (_NUMBER_BYTES * dimensions))
    if len(inputs) > max_inputs:
        raise Refused(LimitExceeded("input", len(inputs), max_inputs, "inputs"))
    return EmbeddingCall(inputs, request.model, request.encoding_format or "float")


def _inputs(value: str | list[Any]) -> tuple[str | tuple[int, ...], ...]:
    """Return the inputs of a text, several texts, token ids, or lists of token ids."""
    items = [value] if isinstance(value, str) or _is_ids(value) else value
    if not items:
        raise field_refusal("input", value, "must hold a text")
    inputs: list[str | tuple[int, ...]] = []
    for index, item in enumerate(items):
        if isinstance(item, str) and item:
            inputs.append(item)
        elif isinstance(item, list) and _is_ids(item):
            inputs.append(tuple(item))
        else:
            raise field_refusal(f"input[{index}]" if isinstance(value, list) else "input", item, _RULE)
    return tuple(inputs)


_RULE: Final = "must be a text or token ids, and not empty"


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(token_id) is int for token_id in value)


class EmbeddingAnswerBuilder:
    """The builder of an embeddings response: the vectors as one JSON object, in the order of the inputs."""

    def __init__(self, model: str, vector_format: Format) -> None:
        self._model = model
        self._vector_format = vector_format
        self._written_items = 0
        self.counts = Counts()

    def add_events(self, events: Sequence[Event]) -> AnswerProgress:
        """Return each vector's JSON as it arrives. The last piece has the usage."""
        data = bytearray()
        for event in events:
            self.counts = event.counts
            match event:
                case Embedded():
                    data += self._item(event.vector)
                case Finished():
                    return AnswerProgress(bytes(data) + self._end(), self.counts, reason=event.reason)
                case Failed():
                    return AnswerProgress(bytes(data), self.counts, failure=event.failure)
                case Generated() | Predicted() | Cancelled():
                    raise AssertionError("not an event of embeddings")
        return AnswerProgress(bytes(data), self.counts)

    def _item(self, vector: bytes) -> bytes:
        shown: object = (
            base64.b64encode(vector).decode() if self._vector_format == "base64" else array("f", vector).tolist()
        )
        item = {"object": "embedding", "index": self._written_items, "embedding": shown}
        before = b"," if self._written_items else b'{"object":"list","data":['
        self._written_items += 1
        return before + msgspec.json.encode(item)

    def _end(self) -> bytes:
        tokens = self.counts.prompt_tokens
        usage = msgspec.json.encode({"prompt_tokens": tokens, "total_tokens": tokens})
        return b'],"model":' + msgspec.json.encode(self._model) + b',"usage":' + usage + b"}"


def input_refusal(
    index: int, count: int, size: int, limit: int, limit_owner: str = "this model", *, unit: str = "tokens"
) -> Refused:
    """Return the refusal of an input over a limit. It names the input's index if there are several inputs."""
    return Refused(LimitExceeded("input" if count == 1 else f"input[{index}]", size, limit, unit, limit_owner))
