"""The signature of a `predict` version: its tensors by name, and a hash with which a caller states the expected schema.

Datatypes and shapes follow the Open Inference Protocol, version 2. The first dimension of every tensor is the number of
rows of a request, and is open.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kelvin.contracts.errors import Refused, SchemaMismatch

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64", "BYTES"
]
Extent = Annotated[int, Meta(ge=-1)]
Value = bool | int | float | str
ANY_EXTENT: Final = -1
_KINDS: Final[Mapping[Datatype, frozenset[type]]] = {
    "BOOL": frozenset({bool}), "BYTES": frozenset({str}), "FP32": frozenset({int, float}),
    "FP64": frozenset({int, float}),
}  # fmt: skip
_WHOLE_NUMBER_TYPES: Final = frozenset({int})
# FP32: the highest double that rounds to FLT_MAX. FLT_MAX in its shortest form (3.4028235e38) is a little above it.
_HIGHEST: Final[Mapping[Datatype, float]] = {"FP32": 3.4028235677973362e38, "FP64": 1.7976931348623157e308}


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor of a signature. `columns` names the entries along its last dimension.

    `examples` are valid input values, from which the known answers are computed. They are not part of the schema.
    """

    name: str
    datatype: Datatype
    shape: tuple[Extent, ...]
    columns: tuple[str, ...] = ()
    examples: tuple[Value, ...] = ()

    def described(self) -> dict[str, object]:
        """Return the description that callers see and that is hashed."""
        shown: dict[str, object] = {"name": self.name, "datatype": self.datatype, "shape": self.shape}
        return shown | ({"columns": self.columns} if self.columns else {})


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors of a request and of its response."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    schema_hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]


def schema_hash_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Return the SHA-256 of the canonical JSON (sorted keys, no spaces, UTF-8) of all described tensors, in order. A
    caller can compute it from a model's metadata with any standard library.
    """
    schema = {"inputs": [spec.described() for spec in inputs], "outputs": [spec.described() for spec in outputs]}
    return hashlib.sha256(msgspec.json.encode(schema, order="sorted")).hexdigest()


def make_signature(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Signature:
    """Return the signature of these tensors with its schema hash."""
    return Signature(tuple(inputs), tuple(outputs), schema_hash_of(inputs, outputs))


def range_of(datatype: Datatype) -> tuple[float, float]:
    """Return the lowest and the highest number of a numeric type."""
    if datatype in _HIGHEST:
        return -_HIGHEST[datatype], _HIGHEST[datatype]
    bits = int(datatype.removeprefix("U").removeprefix("INT"))
    return (0, 2**bits - 1) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def find_invalid_value(values: Sequence[object], datatype: Datatype) -> int | None:
    """Return the index of the first value that is not of the type in JSON, or None if all are.

    A boolean is not a number, and a text is not a byte. A floating-point number is rounded later, but a number outside
    the type's range is invalid.
    """
    kinds = _KINDS.get(datatype, _WHOLE_NUMBER_TYPES)
    numeric = datatype not in ("BOOL", "BYTES")
    low, high = range_of(datatype) if numeric else (0, 0)
    if set(map(type, values)) <= kinds and (not numeric or not values or (low <= min(values) and max(values) <= high)):  # type: ignore[type-var,operator]
        return None
    for at, value in enumerate(values):
        if type(value) not in kinds or (numeric and not low <= value <= high):  # type: ignore[operator]
            return at
    return None


def find_signature_fault(signature: Signature) -> str | None:
    """Return a sentence about the first broken rule, or None if all rules hold."""
    if not signature.inputs or not signature.outputs:
        return "a signature has an input and an output"
    if signature.schema_hash != schema_hash_of(signature.inputs, signature.outputs):
        return "the schema's hash is not that of its tensors"
    for specs in (signature.inputs, signature.outputs):
        if len({spec.name for spec in specs}) != len(specs):
            return "a tensor's name occurs twice"
        for spec in specs:
            if not spec.shape or spec.shape[0] != ANY_EXTENT:
                return f"the first dimension of '{spec.name}' must be open: it is the rows"
    if any(ANY_EXTENT in spec.shape[1:] for spec in signature.inputs):
        return "only the first dimension of an input may be open"
    return None


def check_schema(expected_hash: str, signature: Signature) -> None:
    """Raise `Refused(SchemaMismatch)` if the caller expects another schema. Compares exactly, case included."""
    if expected_hash != signature.schema_hash:
        raise Refused(SchemaMismatch(expected_hash[:80], signature.schema_hash))
