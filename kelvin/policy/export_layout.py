"""Which byte of a version goes where in an exported directory: pinned files as they were, weights as one safetensors.

Which files held the tensors is not part of a version, so all of them come back as `model.safetensors`: widest types
first, then by name, so that each lies on a multiple of its own size. Pushed again, it is the same version.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from contracts.artifact_errors import ManifestCorrupt
from contracts.errors import Refused
from contracts.manifest import DTYPE_BYTES, Manifest, Tensor
from snapshotter.policy.files import PREDICTOR, SINGLE_FILE, Role, find_path_fault, role_of

# What transformers asks for before it reads a file.
_METADATA: Final = {"format": "pt"}
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` of the linear space from `start` on lie at `offset` of a file."""

    start: int
    nbytes: int
    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class ExportLayout:
    """`heads` are the bytes of files that no chunk holds; `spans` are in order of `start`."""

    sizes: dict[str, int]
    heads: dict[str, bytes]
    spans: tuple[Span, ...]


def lay_out(manifest: Manifest, version: str) -> ExportLayout:
    """Raises `Refused(ManifestCorrupt)` where a pinned file has a name that no pushed one has."""
    for file in manifest.files:
        pinned = role_of(file.path) is Role.PINNED or file.path in PREDICTOR
        if find_path_fault(file.path) is not None or not pinned:
            raise Refused(ManifestCorrupt(version, f"it pins {file.path[:80]!r}, which no version does"))
    spans = [Span(file.offset, file.size, file.path, 0) for file in manifest.files]
    if manifest.signature is not None:  # its weights are in a pinned file
        whole = tuple(sorted((span for span in spans if span.nbytes), key=lambda span: span.start))
        return ExportLayout({file.path: file.size for file in manifest.files}, {}, whole)
    ordered = sorted(manifest.tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    head = _header(ordered)
    at = len(head)
    for tensor in ordered:
        spans.append(Span(tensor.offset, tensor.nbytes, SINGLE_FILE, at))
        at += tensor.nbytes
    spans.sort(key=lambda span: (span.start, span.nbytes))
    sizes = {file.path: file.size for file in manifest.files} | {SINGLE_FILE: at}
    return ExportLayout(sizes, {SINGLE_FILE: head}, tuple(span for span in spans if span.nbytes))


def _header(tensors: list[Tensor]) -> bytes:
    """Length and JSON, padded with spaces so that data begins on a multiple of 8."""
    fields: dict[str, object] = {"__metadata__": _METADATA}
    at = 0
    for tensor in tensors:
        end = at + tensor.nbytes
        fields[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGN)
    return len(raw).to_bytes(8, "little") + raw


def pieces(layout: ExportLayout, start: int, length: int) -> Iterator[tuple[str, int, slice]]:
    """Where the bytes of a chunk go: file, offset in it, and which of the chunk's bytes. Padding goes nowhere."""
    first = max(0, bisect_right(layout.spans, start, key=lambda span: span.start) - 1)
    for span in layout.spans[first:]:
        if span.start >= start + length:
            return
        low, high = max(span.start, start), min(span.start + span.nbytes, start + length)
        if low < high:
            yield span.path, span.offset + low - span.start, slice(low - start, high - start)
