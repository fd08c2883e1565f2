"""The manifest of a version: its files, tensors and chunks, their order and digests. See `docs/snapshot-format.md`.

A version *is* the BLAKE3 digest of its canonical manifest. So two sealings of the same bytes must give the same
manifest: it holds no time, place or measurement. An index says where chunks are stored; an attestation says who made
the version.
"""

from itertools import pairwise
from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from kelvin.contracts.artifact_errors import ManifestCorrupt
from kelvin.contracts.artifacts.tensor_schema import Signature, find_signature_fault
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import BadJson, decoder

FORMAT: Final = 1
PAGE_BYTES: Final = 4096
CHUNK_BYTES: Final = 8 << 20
MAX_RANK: Final = 16  # dimensions of a tensor
MAX_FAULT: Final = 400  # characters of a fault's text: names and values may be long
MAX_OFFSET: Final = (1 << 63) - 1  # JSON numbers are unbounded, file offsets are not
# The engine interface that serves a manifest. Raised when bind or attention change their meaning.
ENGINE_INTERFACE: Final = 1


def pad_to_page(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Offset = Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
Size = Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
Dtype = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
Kind = Literal["generate", "embed", "predict"]
DTYPE_BYTES: Final[dict[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`length` bytes (a multiple of PAGE_BYTES) of the version's linear space.

    A chunk's offset is the sum of the lengths before it.
    """

    digest: Digest
    length: Annotated[int, Meta(ge=PAGE_BYTES, le=MAX_OFFSET)]


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor at a page-aligned offset of the linear space, row-major, little-endian."""

    name: str
    dtype: Dtype
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_RANK)]
    offset: Offset

    @property
    def nbytes(self) -> int:
        """Return the bytes of data without padding."""
        count = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            count *= extent
        return count


class PinnedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A small file (config, tokenizer, template) at a page-aligned offset of the same linear space."""

    path: str
    offset: Offset
    size: Size
    digest: Digest


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hard limits that the runtime applies before compute. The activator applies `max_body_bytes` too."""

    max_input_tokens: Annotated[int, Meta(ge=1)]
    max_output_tokens: Annotated[int, Meta(ge=1)]
    max_streams: Annotated[int, Meta(ge=1)] = 64
    max_body_bytes: Annotated[int, Meta(ge=1)] = 1 << 20


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The code that computes: interface version of our engine, model class, compute dtype, and kind of version.

    The kind `generate` is omitted from the JSON, so manifests made before other kinds existed keep their bytes.
    """

    interface: int
    architecture: str
    dtype: Literal["float32", "bfloat16", "float16"]
    kind: Kind = "generate"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The linear space: pinned files first, then tensors in first-use order. Chunks cover all of it.

    A `predict` version has a signature, and its model is a pinned file. Other kinds omit the signature, so their
    manifests keep the bytes that they had before signatures existed.
    """

    format: Literal[1]
    engine: Engine
    limits: Limits
    chunk_bytes: Annotated[int, Meta(ge=PAGE_BYTES)]
    files: tuple[PinnedFile, ...]
    tensors: tuple[Tensor, ...]
    chunks: tuple[Chunk, ...]
    signature: Signature | None = None

    @property
    def total_bytes(self) -> int:
        """Return the length of the linear space."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all tensors without padding."""
        return sum(tensor.nbytes for tensor in self.tensors)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the canonical bytes, which are digested and stored: JSON with sorted keys and no spaces."""
    return msgspec.json.encode(manifest, order="sorted")


def version_of(canonical: bytes) -> str:
    """Return the version that these canonical bytes define: BLAKE3, 64 hex digits."""
    return blake3(canonical).hexdigest()


def decode_manifest(raw: bytes, version: str) -> Manifest:
    """Check digest, schema, canonical form and geometry. Raises `Refused(ManifestCorrupt)`."""
    if version_of(raw) != version:
        raise Refused(ManifestCorrupt(version, "its bytes do not match the version's digest"))
    try:
        manifest = decoder(Manifest).decode(raw)
    except BadJson as error:
        raise Refused(ManifestCorrupt(version, str(error))) from error
    if encode_manifest(manifest) != raw:
        raise Refused(ManifestCorrupt(version, "it is not in canonical form"))
    if (fault := find_manifest_fault(manifest)) is not None:
        raise Refused(ManifestCorrupt(version, fault[:MAX_FAULT]))
    return manifest


def find_manifest_fault(manifest: Manifest) -> str | None:
    """Return a sentence about the first broken rule of geometry or signature, or None if all rules hold."""
    if (manifest.engine.kind == "predict") != (manifest.signature is not None):
        return "a version has a signature if its kind is 'predict', and only then"
    if manifest.signature is not None and (fault := find_signature_fault(manifest.signature)) is not None:
        return fault
    spans = [(file.offset, file.size, file.path) for file in manifest.files]
    spans += [(tensor.offset, tensor.nbytes, tensor.name) for tensor in manifest.tensors]
    names = [name for _, _, name in spans]
    if len(set(names)) != len(names):
        return "a name occurs twice"
    total = manifest.total_bytes
    for offset, nbytes, name in spans:
        if offset % PAGE_BYTES:
            return f"'{name}' starts at {offset}, not on a {PAGE_BYTES}-byte boundary"
        if offset + nbytes > total:
            return f"'{name}' ends at {offset + nbytes}, after the last chunk ({total})"
    for (offset, nbytes, name), (following, _, later) in pairwise(spans):
        if following < offset + nbytes:
            return f"'{later}' overlaps '{name}' or precedes it"
    for chunk in manifest.chunks:
        if chunk.length % PAGE_BYTES or chunk.length > manifest.chunk_bytes:
            return f"chunk {chunk.digest} has a length of {chunk.length}"
    return None
