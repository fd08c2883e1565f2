"""Decide whether a directory may become a predictor version.

`model.onnx` is judged whole. `signature.json` adds facts that a graph can't express. Both are pinned, so the judged
bytes are the served bytes.

`signature.json` describes tensors of the graph. A `datatype` and a `shape` must agree with it; the shape may fix open
dimensions, except the rows. `columns` name the entries of the last dimension; `examples` serve for the known answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NoReturn

import msgspec
from msgspec import structs

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.push_api import PlanRequest, SmallFile
from kelvin.contracts.artifacts.runtime_control import GateFacts
from kelvin.contracts.artifacts.tensor_schema import (
    ANY_EXTENT,
    Datatype,
    Extent,
    Signature,
    TensorSpec,
    Value,
    find_invalid_value,
    find_signature_fault,
    make_signature,
)
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import MAX_RULE, convert
from snapshotter.intake.policy.file_roles import ONNX_FILE, PREDICTOR, SIGNATURE_FILE, max_bytes_of
from snapshotter.intake.policy.onnx_graph import MAX_EXTENT, read_graph
from snapshotter.intake.policy.strict_json import is_text, parse_object

ARCHITECTURE: Final = "onnx"
MAX_ROWS: Final = 4096  # per request
MAX_EXAMPLES: Final = 1024


@dataclass(frozen=True, slots=True)
class PredictorIntake:
    """An admitted predictor. `files` are in name order."""

    files: tuple[SmallFile, ...]
    signature: Signature


class _DeclaredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    datatype: Datatype | None = None
    shape: tuple[Extent, ...] | None = None
    columns: tuple[str, ...] = ()
    examples: tuple[Value, ...] = ()


class _SignatureFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    inputs: tuple[_DeclaredTensor, ...] = ()
    outputs: tuple[_DeclaredTensor, ...] = ()


def admit_predictor(request: PlanRequest) -> PredictorIntake:
    """Judge a push whose paths were checked. Raises `Refused(ArtifactRejected)` with the file and the reason."""
    if request.weights:
        _reject(request.weights[0].path, f"'{ONNX_FILE}' contains all weights of this directory")
    contents: dict[str, bytes] = {}
    for file in request.small_files:
        if file.path not in PREDICTOR:
            _reject(file.path, "it is not a file that such a version pins")
        if len(file.content) > (limit := max_bytes_of(file.path)):
            _reject(file.path, f"it has {len(file.content)} bytes; the limit is {limit}")
        contents[file.path] = file.content
    if left_out := PREDICTOR & set(request.other_paths):
        _reject(min(left_out), "it must be sent whole")
    inputs, outputs = read_graph(contents[ONNX_FILE])
    if SIGNATURE_FILE in contents:
        declared = _read_signature(contents[SIGNATURE_FILE])
        inputs = _apply_declarations(inputs, declared.inputs, "input")
        outputs = _apply_declarations(outputs, declared.outputs, "output")
    for spec in inputs:
        if ANY_EXTENT in spec.shape[1:]:
            rule = f"the input '{spec.name}' is {list(spec.shape)}: all but its rows must be fixed"
            _reject(ONNX_FILE, f"{rule}, here or in '{SIGNATURE_FILE}'")
    if (values := sum(prod(spec.shape[1:]) for spec in inputs)) > MAX_EXTENT:
        _reject(ONNX_FILE, f"a row of all inputs has {values} values; the limit is {MAX_EXTENT}")
    signature = make_signature(inputs, outputs)
    if (fault := find_signature_fault(signature)) is not None:
        _reject(ONNX_FILE, fault)
    return PredictorIntake(tuple(sorted(request.small_files, key=lambda file: file.path)), signature)


def predictor_facts() -> GateFacts:
    """Return the facts that the gate returns for other models. The graph was judged here, so no gate runs."""
    return GateFacts(
        architecture=ARCHITECTURE,
        dtype="float32",
        layers=0,
        kv_heads=0,
        head_dim=0,
        value_dim=0,
        vocab_size=0,
        max_positions=MAX_ROWS,
        kv_bytes_per_token=0,
        first_use=(),
        kind="predict",
    )


def _reject(path: str, reason: str) -> NoReturn:
    raise Refused(ArtifactRejected(path, reason[:MAX_RULE]))


def _read_signature(raw: bytes) -> _SignatureFile:
    try:
        return convert(parse_object(raw, SIGNATURE_FILE), _SignatureFile)
    except msgspec.ValidationError as error:
        _reject(SIGNATURE_FILE, str(error))


def _apply_declarations(
    specs: Sequence[TensorSpec], declared: Sequence[_DeclaredTensor], kind: str
) -> tuple[TensorSpec, ...]:
    """Return the graph's tensors with the facts of the signature file."""
    by_name = {each.name: each for each in declared}
    if len(by_name) != len(declared):
        _reject(SIGNATURE_FILE, f"an {kind} is named twice")
    if unknown := sorted(by_name.keys() - {spec.name for spec in specs}):
        _reject(SIGNATURE_FILE, f"the {kind} {unknown[0][:80]!r} is not in '{ONNX_FILE}'")
    return tuple(_apply_declaration(spec, by_name[spec.name]) if spec.name in by_name else spec for spec in specs)


def _apply_declaration(spec: TensorSpec, declared: _DeclaredTensor) -> TensorSpec:
    if declared.datatype not in (None, spec.datatype):
        _reject(SIGNATURE_FILE, f"'{spec.name}' is {declared.datatype} here and {spec.datatype} in '{ONNX_FILE}'")
    shape = spec.shape if declared.shape is None else _fix_shape(spec, declared.shape)
    if declared.columns and (
        len(shape) != 2 or len(declared.columns) != shape[1] or not all(map(is_text, declared.columns))
    ):
        rule = f"'{spec.name}' is {list(shape)}: it has {len(declared.columns)} columns here"
        _reject(SIGNATURE_FILE, rule)
    if len(set(declared.columns)) != len(declared.columns):
        _reject(SIGNATURE_FILE, f"a column of '{spec.name}' is named twice")
    # Refuse NaN: no comparison below finds it, and JSON can't hold it.
    are_plain = all(is_text(value) if isinstance(value, str) else value == value for value in declared.examples)
    if (
        len(declared.examples) > MAX_EXAMPLES
        or not are_plain
        or find_invalid_value(declared.examples, spec.datatype) is not None
    ):
        _reject(SIGNATURE_FILE, f"the examples of '{spec.name}' must be {spec.datatype}, {MAX_EXAMPLES} at most")
    return structs.replace(spec, shape=shape, columns=declared.columns, examples=declared.examples)


def _fix_shape(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    agrees = len(shape) == len(spec.shape) and shape[:1] == spec.shape[:1]
    if not agrees or any(
        own not in (ANY_EXTENT, stated) or stated == 0 for own, stated in zip(spec.shape, shape, strict=True)
    ):
        _reject(SIGNATURE_FILE, f"'{spec.name}' is {list(shape)} here and {list(spec.shape)} in '{ONNX_FILE}'")
    if max(shape) > MAX_EXTENT:
        _reject(SIGNATURE_FILE, f"'{spec.name}' is {list(shape)}: a dimension is at most {MAX_EXTENT}")
    return shape
