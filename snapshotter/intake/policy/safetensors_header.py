"""Read the header of a safetensors file strictly: its tensors must cover the file's bytes exactly once.

Source: the format section of the safetensors README: `u64 LE length | JSON | data`, offsets from the data's start.
Values are not read. `intake.py` decides which tensors belong together.
"""

from dataclasses import dataclass
from math import prod
from typing import Final, cast

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import DTYPE_BYTES, MAX_RANK, Dtype
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.strict_json import JsonObject, as_count, is_text, parse_object

PREFIX_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # the reference implementation's own limit
MAX_NAME_BYTES: Final = 1024
METADATA: Final = "__metadata__"
_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor in a pushed file: `nbytes` at `offset` from the file's start, row-major, little-endian."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int


def header_bytes(prefix: bytes, file_size: int, path: str) -> int:
    """Return the bytes of prefix and JSON together, from the first 8 bytes. Raises `Refused(ArtifactRejected)`."""
    if len(prefix) < PREFIX_BYTES or file_size < PREFIX_BYTES:
        raise Refused(ArtifactRejected(path, f"a safetensors file begins with {PREFIX_BYTES} bytes of length"))
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise Refused(ArtifactRejected(path, f"its header claims {length} bytes; the limit is {MAX_HEADER_BYTES}"))
    if PREFIX_BYTES + length > file_size:
        raise Refused(ArtifactRejected(path, f"its header claims {length} bytes, but the file has {file_size}"))
    return PREFIX_BYTES + length


def parse_header(path: str, raw: bytes, file_size: int) -> tuple[SourceTensor, ...]:
    """Return the tensors in order of their offsets. `raw` is prefix and JSON, nothing more.

    Raises `Refused(ArtifactRejected)` with file, tensor and rule.
    """
    end = header_bytes(raw, file_size, path)
    if len(raw) != end:
        raise Refused(ArtifactRejected(path, f"its header has {end} bytes, of which {len(raw)} were sent"))
    if raw[PREFIX_BYTES : PREFIX_BYTES + 1] != b"{":
        raise Refused(ArtifactRejected(path, "its header does not begin with '{'"))
    found = parse_object(memoryview(raw)[PREFIX_BYTES:], path)
    _check_metadata(found.pop(METADATA, {}), path)
    tensors = [_tensor(name, value, path, end) for name, value in found.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes, tensor.name))
    _check_cover(tensors, path, end, file_size)
    return tuple(tensors)


def _check_metadata(value: object, path: str) -> None:
    is_valid = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if not is_valid:
        raise Refused(ArtifactRejected(path, f"{METADATA} must map texts to texts"))


def _tensor(name: str, value: object, path: str, data_start: int) -> SourceTensor:
    label = f"tensor {name[:80]!r}"
    if not is_text(name) or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise Refused(ArtifactRejected(path, f"{label}: a name has 1 to {MAX_NAME_BYTES} bytes of UTF-8"))
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise Refused(ArtifactRejected(path, f"{label}: must have exactly dtype, shape and data_offsets"))
    dtype, shape = _dtype(value, path, label), _shape(value, path, label)
    begin, end = _span(value, path, label)
    expected_bytes = DTYPE_BYTES[dtype] * prod(shape)
    if end - begin != expected_bytes:
        rule = f"{label}: {dtype} of shape {list(shape)} has {expected_bytes} bytes, but its offsets span {end - begin}"
        raise Refused(ArtifactRejected(path, rule))
    return SourceTensor(name, dtype, shape, path, data_start + begin, expected_bytes)


def _dtype(value: JsonObject, path: str, label: str) -> Dtype:
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise Refused(ArtifactRejected(path, f"{label}: dtype {str(dtype)[:20]!r} is not one of {known}"))
    return cast(Dtype, dtype)


def _shape(value: JsonObject, path: str, label: str) -> tuple[int, ...]:
    shape = value["shape"]
    extents = [as_count(extent) for extent in shape] if isinstance(shape, list) else [None]
    counts = [extent for extent in extents if extent is not None]
    if len(counts) != len(extents) or len(counts) > MAX_RANK:
        raise Refused(
            ArtifactRejected(path, f"{label}: shape must be at most {MAX_RANK} whole numbers, none negative or huge")
        )
    return tuple(counts)


def _span(value: JsonObject, path: str, label: str) -> tuple[int, int]:
    offsets = value["data_offsets"]
    if isinstance(offsets, list) and len(offsets) == 2:
        begin, end = as_count(offsets[0]), as_count(offsets[1])
        if begin is not None and end is not None and begin <= end:
            return begin, end
    raise Refused(ArtifactRejected(path, f"{label}: data_offsets must be [begin, end], whole numbers, begin <= end"))


def _check_cover(tensors: list[SourceTensor], path: str, data_start: int, file_size: int) -> None:
    """Check that the tensors are adjacent, from offset 0 to the end of the file."""
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            hole = f"leaves a hole of {tensor.offset - end} bytes"
            fault = "overlaps the one before it" if tensor.offset < end else hole
            raise Refused(ArtifactRejected(path, f"tensor {tensor.name[:80]!r} {fault}"))
        end += tensor.nbytes
    if end != file_size:
        fault = f"its tensors end at byte {end}, but the file has {file_size}"
        raise Refused(ArtifactRejected(path, fault))
