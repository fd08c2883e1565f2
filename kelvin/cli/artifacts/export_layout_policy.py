"""Plan which byte of a version goes where in an exported directory. Pure.

Pinned files come back unchanged. A version does not record which files held its tensors, so all tensors go into one
`model.safetensors`. Tensors are sorted by width of their type (widest first), then by name, so that each is aligned to
its own element size. Pushing the export again yields the same version. If the store kept the pushed tensorizer file,
that file comes back.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kelvin.contracts.artifact_errors import ManifestCorrupt
from kelvin.contracts.artifacts.attestation import read_origin
from kelvin.contracts.artifacts.manifest import DTYPE_BYTES, Manifest, Tensor, pad_to_page
from kelvin.contracts.artifacts.object_keys import BUNDLE_PREFIX, ORIGIN_PREFIX
from kelvin.contracts.artifacts.push_api import AttestationEntry, Original
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.file_roles import PREDICTOR, SINGLE_FILE, FileRole, find_path_fault, role_of

TENSORS_FILE: Final = "model.tensors"
# transformers refuses to load a file without this.
_METADATA: Final = {"format": "pt"}
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class LayoutSpan:
    """A run of `nbytes` of the version's linear space from `start`, at `offset` of a file."""

    start: int
    nbytes: int
    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class ExportLayout:
    """Where an export's bytes come from. `sizes` are the files' sizes. `fixed` are bytes outside of any chunk: file,
    offset, bytes. `spans` are sorted by `start`.
    """

    sizes: dict[str, int]
    fixed: tuple[tuple[str, int, bytes], ...]
    spans: tuple[LayoutSpan, ...]


def plan_layout(manifest: Manifest, version: str) -> ExportLayout:
    """Return the layout of a safetensors export. Raises `Refused(ManifestCorrupt)` for an unknown pinned file."""
    spans = _pinned_spans(manifest, version)
    if manifest.signature is not None:  # a graph version keeps its weights in a pinned file
        whole = tuple(sorted(_filled(spans), key=lambda span: span.start))
        return ExportLayout({file.path: file.size for file in manifest.files}, (), whole)
    ordered = sorted(manifest.tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    head = _header(ordered)
    at = len(head)
    for tensor in ordered:
        spans.append(LayoutSpan(tensor.offset, tensor.nbytes, SINGLE_FILE, at))
        at += tensor.nbytes
    spans.sort(key=lambda span: (span.start, span.nbytes))
    sizes = {file.path: file.size for file in manifest.files} | {SINGLE_FILE: at}
    return ExportLayout(sizes, ((SINGLE_FILE, 0, head),), tuple(_filled(spans)))


def plan_original_layout(manifest: Manifest, version: str, original: Original) -> ExportLayout:
    """Return the layout of an export as the pushed tensorizer file, beside the pinned files. Raises
    `Refused(ManifestCorrupt)` as `plan_layout` does, and if `original` contradicts the manifest.
    """
    spans = _pinned_spans(manifest, version)
    loose = len(manifest.chunks) - len(original.spans)
    if loose < 0:
        raise Refused(ManifestCorrupt(version, "its file was said to hold more chunks than it has"))
    chunks = manifest.chunks[loose:]
    start = sum(chunk.length for chunk in manifest.chunks) - sum(chunk.length for chunk in chunks)
    inside: list[LayoutSpan] = []
    for chunk, parts in zip(chunks, original.spans, strict=True):
        at = start
        for offset, length in parts:
            inside.append(LayoutSpan(at, length, TENSORS_FILE, offset))
            at += pad_to_page(length)
        start += chunk.length
        if at != start:
            raise Refused(ManifestCorrupt(version, f"chunk {chunk.digest} does not lie in its file as was said"))
    fixed: list[tuple[str, int, bytes]] = []
    end = taken = 0
    for span in (*sorted(inside, key=lambda span: span.offset), LayoutSpan(0, 0, TENSORS_FILE, original.size)):
        if span.offset < end:
            raise Refused(ManifestCorrupt(version, f"its file's bytes at {span.offset} were said to be two things"))
        if span.offset > end:
            fixed.append((TENSORS_FILE, end, original.rest[taken : taken + span.offset - end]))
            taken += span.offset - end
        end = span.offset + span.nbytes
    if taken != len(original.rest):
        raise Refused(ManifestCorrupt(version, "its file has another size than was said"))
    sizes = {file.path: file.size for file in manifest.files} | {TENSORS_FILE: original.size}
    return ExportLayout(sizes, tuple(fixed), tuple(sorted(_filled(spans) + inside, key=lambda span: span.start)))


def _filled(spans: list[LayoutSpan]) -> list[LayoutSpan]:
    return [span for span in spans if span.nbytes]


def _pinned_spans(manifest: Manifest, version: str) -> list[LayoutSpan]:
    for file in manifest.files:
        pinned = role_of(file.path) is FileRole.PINNED or file.path in PREDICTOR
        if find_path_fault(file.path) is not None or not pinned:
            raise Refused(ManifestCorrupt(version, f"it pins {file.path[:80]!r}, which no version does"))
    return [LayoutSpan(file.offset, file.size, file.path, 0) for file in manifest.files]


def _header(tensors: list[Tensor]) -> bytes:
    """Return the safetensors header: length and JSON, padded with spaces to a multiple of 8 bytes."""
    fields: dict[str, object] = {"__metadata__": _METADATA}
    at = 0
    for tensor in tensors:
        end = at + tensor.nbytes
        fields[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGN)
    return len(raw).to_bytes(8, "little") + raw


def chunk_slices(layout: ExportLayout, start: int, length: int) -> Iterator[tuple[str, int, slice]]:
    """Yield the destinations of a chunk's bytes: file, offset, slice of the chunk. Padding has none."""
    first = max(0, bisect_right(layout.spans, start, key=lambda span: span.start) - 1)
    for span in layout.spans[first:]:
        if span.start >= start + length:
            return
        low, high = max(span.start, start), min(span.start + span.nbytes, start + length)
        if low < high:
            yield span.path, span.offset + low - span.start, slice(low - start, high - start)


def find_bundle(version: str, entries: Iterable[AttestationEntry]) -> bytes | None:
    """Return the OpenSSF bundle for an export, or None. Trusted keys come first, then the latest statement."""
    good = [entry for entry in entries if entry.fault is None]
    bundles = {
        blake3(entry.content).hexdigest(): entry.content for entry in good if entry.name.startswith(BUNDLE_PREFIX)
    }
    found: list[tuple[bool, int, bytes]] = []
    for entry in good:
        if entry.name.startswith(ORIGIN_PREFIX):
            origin, _ = read_origin(entry.content, version)
            if origin.bundle in bundles:
                found.append((entry.trusted_as is not None, origin.signed_at_s, bundles[origin.bundle]))
    return max(found)[2] if found else None
