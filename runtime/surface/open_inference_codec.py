"""The Open Inference Protocol, version 2: decode requests against a version's signature, render responses. No I/O.

Specification: kserve/open-inference-protocol, inference_rest. Tensors are JSON, nested or flat in row-major order.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgspec

from kelvin.contracts.artifacts.tensor_schema import Signature, TensorSpec, check_schema, find_invalid_value
from kelvin.contracts.errors import InvalidRequest, LimitExceeded, Refused
from kelvin.contracts.serving.stream_frames import MAX_PAYLOAD, Counts
from runtime.drivers.interface import Cancelled, Embedded, Event, Failed, Finished, Generated, Predicted
from runtime.surface.answer_builder import AnswerProgress
from runtime.surface.openai_requests import convert_request, field_refusal, parse_json_body

MAX_ID: Final = 256
# How many values are encoded at once. A number has at most 25 bytes; a text has any length.
_PIECE_NUMBERS: Final = 4096
_PIECE_TEXTS: Final = 64
_BURST_BYTES: Final = 16_384  # encoded before the event loop may run other requests
# Parameters that ask for another form of request or response, unless their value is false or absent.
_UNSUPPORTED: Final = (
    "binary_data", "binary_data_size", "binary_data_output", "shared_memory_region", "shared_memory_byte_size",
    "shared_memory_offset", "classification", "sequence_id", "priority", "timeout",
)  # fmt: skip


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any]
    parameters: dict[str, Any] | None = None


class _Output(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct, frozen=True):
    inputs: list[_Tensor]
    id: str | None = None
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input that matches the signature: row-major values and the whole shape."""

    spec: TensorSpec
    shape: tuple[int, ...]
    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class PredictionCall:
    """A decoded request. `outputs` are indices into the signature, in the order of the response."""

    rows: int
    inputs: tuple[InputTensor, ...]
    outputs: tuple[int, ...]
    id: str | None


def decode_prediction(raw: bytes, signature: Signature, max_rows: int) -> PredictionCall:
    """Decode a `POST …/infer`. Raises `Refused`: InvalidRequest with value and rule, LimitExceeded, SchemaMismatch."""
    request = convert_request(parse_json_body(raw), _Request)
    if request.id is not None and len(request.id) > MAX_ID:
        raise field_refusal("id", request.id[:20], f"must have at most {MAX_ID} characters")
    _check_parameters("parameters", request.parameters, signature)
    outputs = _outputs(request.outputs, signature)
    tensors = {tensor.name: tensor for tensor in request.inputs}
    if len(tensors) != len(request.inputs):
        raise field_refusal("inputs", "(names)", "an input is given twice")
    specs = {spec.name: spec for spec in signature.inputs}
    for name in tensors:
        if name not in specs:
            raise field_refusal("inputs", name[:80], f"the inputs of this version are {', '.join(specs)[:200]}")
    for name in specs:
        if name not in tensors:
            raise field_refusal("inputs", "(missing)", f"the input '{name}' is required")
    inputs = tuple(_input(tensors[spec.name], spec, max_rows) for spec in signature.inputs)
    rows = inputs[0].shape[0]
    if any(each.shape[0] != rows for each in inputs):
        counts = ", ".join(str(each.shape[0]) for each in inputs[:8])
        raise field_refusal("inputs", counts, "all inputs must have the same number of rows")
    return PredictionCall(rows, inputs, outputs, request.id)


def _check_parameters(field: str, parameters: Mapping[str, Any] | None, signature: Signature | None = None) -> None:
    for name, value in (parameters or {}).items():
        if name in _UNSUPPORTED and value not in (False, None, 0):
            raise field_refusal(f"{field}.{name}", str(value)[:80], "is not supported")
        if name == "schema_hash" and signature is not None:
            if not isinstance(value, str):
                raise field_refusal(f"{field}.schema_hash", str(value)[:80], "must be a text")
            check_schema(value, signature)


def _outputs(requested: Sequence[_Output] | None, signature: Signature) -> tuple[int, ...]:
    """Return the indices of the requested outputs. None and an empty list request all."""
    indices = {spec.name: index for index, spec in enumerate(signature.outputs)}
    if not requested:
        return tuple(indices.values())
    for output in requested:
        if output.name not in indices:
            raise field_refusal(
                "outputs", output.name[:80], f"the outputs of this version are {', '.join(indices)[:200]}"
            )
        _check_parameters(f"outputs.{output.name}.parameters", output.parameters)
    if len({output.name for output in requested}) != len(requested):
        raise field_refusal("outputs", "(names)", "an output is requested twice")
    return tuple(indices[output.name] for output in requested)


def _input(tensor: _Tensor, spec: TensorSpec, max_rows: int) -> InputTensor:
    field = f"inputs.{spec.name}"
    _check_parameters(f"{field}.parameters", tensor.parameters)
    if tensor.datatype != spec.datatype:
        raise field_refusal(f"{field}.datatype", tensor.datatype[:20], f"must be {spec.datatype}")
    shape = tuple(tensor.shape)
    if len(shape) != len(spec.shape) or shape[1:] != spec.shape[1:] or shape[0] < 1:
        wanted = ", ".join(["rows (1 or more)", *map(str, spec.shape[1:])])
        raise field_refusal(f"{field}.shape", str(list(shape))[:80], f"must be [{wanted}]")
    if shape[0] > max_rows:
        raise Refused(LimitExceeded("inputs", shape[0], max_rows, "rows"))
    values = _flatten(tensor.data, shape, f"{field}.data")
    if (index := find_invalid_value(values, spec.datatype)) is not None:
        shown = "null" if values[index] is None else str(values[index])[:40]
        raise field_refusal(f"{field}.data[{index}]", shown, f"must be {spec.datatype}")
    return InputTensor(spec, shape, values)


def _flatten(data: list[Any], shape: tuple[int, ...], field: str) -> list[Any]:
    """Return the values in row-major order, from nested lists of exactly this shape or from a flat list."""
    count = prod(shape)
    values = data
    if data and isinstance(data[0], list):
        for depth, extent in enumerate(shape[1:], 1):
            if not all(isinstance(item, list) and len(item) == extent for item in values) or len(values) > count:
                raise field_refusal(field, "(lists)", f"must be lists of {extent} at depth {depth}, or one flat list")
            values = [value for item in values for value in item]
    if len(values) != count or (data is not values and len(data) != shape[0]):
        raise field_refusal(field, f"({len(values)} values)", f"must be {count}, as the shape says")
    return values


class PredictionAnswerBuilder:
    """The builder of a prediction's response: one JSON object once all rows have their outputs."""

    def __init__(self, model: str, version: str, signature: Signature, call: PredictionCall) -> None:
        self._model = model
        self._version = version
        self._signature = signature
        self._call = call
        self._predicted: list[tuple[Any, ...]] = []
        self._min_bytes = 0  # a lower bound of the response: a value and its comma are two bytes
        self.counts = Counts()

    async def add_events(self, events: Sequence[Event]) -> AnswerProgress:
        """Add events. Return no data before the last one."""
        for event in events:
            self.counts = event.counts
            match event:
                case Predicted():
                    if (name := self._find_misshapen(event.outputs)) is not None:
                        rule = f"the model's '{name}' has another shape for some rows: request those separately"
                        return AnswerProgress(b"", self.counts, failure=InvalidRequest("inputs", "(values)", rule))
                    self._predicted.append(event.outputs)
                    self._min_bytes += 2 * sum(event.outputs[index].size for index in self._call.outputs)
                    if self._min_bytes > MAX_PAYLOAD:  # fail before encoding, which could take ten times as much memory
                        return self._too_long(self._min_bytes)
                case Finished():
                    return await self._end(event)
                case Failed():
                    return AnswerProgress(b"", self.counts, failure=event.failure)
                case Generated() | Embedded() | Cancelled():
                    raise AssertionError("not an event of a prediction")
        return AnswerProgress(b"", self.counts)

    def _find_misshapen(self, outputs: Sequence[Any]) -> str | None:
        """Return the name of an output whose rows differ in shape from the earlier rows."""
        for index in self._call.outputs if self._predicted else ():
            if outputs[index].shape[1:] != self._predicted[0][index].shape[1:]:
                return self._signature.outputs[index].name
        return None

    async def _end(self, event: Finished) -> AnswerProgress:
        """Encode the response. Other requests may run after every burst."""
        pieces: list[bytes] = []
        nbytes = burst = 0
        for piece in self._json_pieces():
            pieces.append(piece)
            nbytes += len(piece)
            burst += len(piece)
            if nbytes > MAX_PAYLOAD:
                return self._too_long(nbytes)
            if burst > _BURST_BYTES:
                burst = 0
                await asyncio.sleep(0)
        return AnswerProgress(b"".join(pieces), self.counts, reason=event.reason)

    def _too_long(self, nbytes: int) -> AnswerProgress:
        return AnswerProgress(b"", self.counts, failure=LimitExceeded("outputs", nbytes, MAX_PAYLOAD, "bytes"))

    def _json_pieces(self) -> Iterator[bytes]:
        """Yield the response's JSON in pieces that are quick to encode."""
        answer = {"model_name": self._model, "model_version": self._version}
        if self._call.id is not None:
            answer["id"] = self._call.id
        yield msgspec.json.encode(answer)[:-1] + b',"outputs":['
        for position, index in enumerate(self._call.outputs):
            if position:
                yield b","
            yield from self._output(index)
        yield b"]}"

    def _output(self, index: int) -> Iterator[bytes]:
        spec, parts = self._signature.outputs[index], [outputs[index] for outputs in self._predicted]
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        yield msgspec.json.encode({"name": spec.name, "datatype": spec.datatype, "shape": shape})[:-1] + b',"data":['
        step = _PIECE_TEXTS if spec.datatype == "BYTES" else _PIECE_NUMBERS
        separator = b""
        for part in parts:
            values = part.ravel()
            for start in range(0, values.size, step):
                yield separator + msgspec.json.encode(values[start : start + step].tolist())[1:-1]
                separator = b","
        yield b"]}"
