"""Every release opens the golden snapshot of format 1 byte for byte.

`format-1/` is one tenant's part of an object store (paths are keys). It was made on 2026-11-20 by pushing `source()`
with chunks of 8192 bytes and packs of 32768. Never regenerate it: code that can't open it can't open users' snapshots.
"""

import json
import struct
from pathlib import Path

import pytest
from blake3 import blake3

from kelvin.blobstore.packs import decode_footer, decode_table
from kelvin.contracts.artifacts.manifest import (
    PAGE_BYTES,
    Chunk,
    Manifest,
    decode_manifest,
    encode_manifest,
    find_manifest_fault,
    version_of,
)
from kelvin.contracts.artifacts.object_keys import attestation_key, index_key, inputs_key, manifest_key, pack_key
from kelvin.contracts.artifacts.push_api import SmallFile
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.wire import decode
from snapshotter.intake.policy.layout import assemble, lay_out
from snapshotter.intake.policy.safetensors_header import parse_header
from snapshotter.intake.policy.version_inputs import Sealing, build_manifest, inputs_digest
from tests.snapshotter.models import Weight, safetensors

ROOT = Path(__file__).parent / "format-1"
TENANT = "golden"
VERSION = "f6f3437ac7c7fbd35d86324721bfb5e7ce07734e35c41bf62c70ffff01691f1d"

FILES = {
    "config.json": b'{"architectures": ["ToyForCausalLM"], "dtype": "float32", '
    b'"max_position_embeddings": 64, "vocab_size": 6}',
    "tokenizer.json": b'{"added_tokens": [], "model": {"vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5}}}',
    "chat_template.jinja": "{{ messages[0].content }} — größer als ASCII\n".encode(),
}


def bfloat16(values: list[float]) -> bytes:
    return b"".join(struct.pack("<f", value)[2:] for value in values)


WEIGHTS = {
    "model.embed_tokens.weight": Weight("F32", (6, 2), struct.pack("<12f", *(n / 4 for n in range(12)))),
    "model.layers.0.large.weight": Weight("F32", (50, 61), struct.pack("<3050f", *(n - 1525 for n in range(3050)))),
    "model.layers.0.norm.weight": Weight("BF16", (4,), bfloat16([1.0, -2.0, 0.5, 3.0])),
    "model.layers.1.bias": Weight("F16", (3,), struct.pack("<3e", 1.5, -0.25, 65504.0)),
    "model.layers.1.empty": Weight("F32", (0, 3), b""),
    "model.layers.1.steps": Weight("I64", (), struct.pack("<q", -(1 << 40))),
    "model.norm.weight": Weight("F32", (2,), struct.pack("<2f", 1.0, 2.0)),
}


def source() -> dict[str, bytes]:
    """Return the files of the directory that was pushed."""
    return {**FILES, "model.safetensors": safetensors(WEIGHTS, {"format": "pt"})}


def manifest() -> Manifest:
    return decode_manifest((ROOT / manifest_key(TENANT, VERSION)).read_bytes(), VERSION)


def test_opens_with_nothing_of_ours() -> None:
    """Standard JSON, BLAKE3 and the format's page in docs/ are enough to read every file and tensor back."""
    raw = (ROOT / TENANT / "manifests" / VERSION).read_bytes()
    assert blake3(raw).hexdigest() == VERSION
    found = json.loads(raw)
    chunks = {}
    for pack in (ROOT / TENANT / "packs").iterdir():
        data = pack.read_bytes()
        assert blake3(data).hexdigest() == pack.name
        assert data[-8:] == b"KELVPK01"
        table = data[-16 - int.from_bytes(data[-16:-8], "little") : -16]
        assert (ROOT / TENANT / "index" / pack.name).read_bytes() == table
        for digest, offset, length in json.loads(table):
            chunks[digest] = data[offset : offset + length]
            assert blake3(chunks[digest]).hexdigest() == digest
    space = b"".join(chunks[chunk["digest"]] for chunk in found["chunks"])
    assert found["format"] == 1
    for file in found["files"]:
        assert space[file["offset"] : file["offset"] + file["size"]] == FILES[file["path"]]
    assert {tensor["name"] for tensor in found["tensors"]} == WEIGHTS.keys()
    for tensor in found["tensors"]:
        want = WEIGHTS[tensor["name"]]
        assert (tensor["dtype"], tuple(tensor["shape"])) == (want.dtype, want.shape)
        assert space[tensor["offset"] : tensor["offset"] + len(want.data)] == want.data
        assert tensor["offset"] % 4096 == 0


def test_todays_code_opens_it() -> None:
    """Manifest, packs, index and attestation decode and agree with each other."""
    found = manifest()
    assert find_manifest_fault(found) is None
    assert encode_manifest(found) == (ROOT / manifest_key(TENANT, VERSION)).read_bytes()
    lengths: dict[str, int] = {}
    for path in (ROOT / TENANT / "packs").iterdir():
        raw = (ROOT / pack_key(TENANT, path.name)).read_bytes()
        entries = decode_footer(raw, len(raw), path.name)
        assert decode_table((ROOT / index_key(TENANT, path.name)).read_bytes(), path.name) == entries
        lengths |= {entry.digest: entry.length for entry in entries}
    assert lengths == {chunk.digest: chunk.length for chunk in found.chunks}
    (path,) = (ROOT / TENANT / "attestations" / VERSION).iterdir()
    attestation = decode(path.read_bytes(), SealAttestation)
    assert attestation.version == VERSION
    assert ROOT / attestation_key(TENANT, VERSION, attestation.fingerprint) == path


def test_todays_code_would_make_it_again() -> None:
    """The same directory and options still give the same version. Otherwise every push would send all bytes again."""
    golden = manifest()
    sealing = Sealing(golden.format, golden.chunk_bytes, golden.engine, golden.limits)
    files = source()
    raw = files["model.safetensors"]
    header = raw[: 8 + int.from_bytes(raw[:8], "little")]
    tensors = parse_header("model.safetensors", header, len(raw))
    pinned = [(SmallFile(path=path, content=content), blake3(content).hexdigest()) for path, content in FILES.items()]
    first_use = [tensor.name for tensor in golden.tensors]
    layout = lay_out(pinned, tensors, first_use, golden.chunk_bytes)
    data = [assemble(chunk, files) for chunk in layout.chunks]
    chunks = [Chunk(blake3(each).hexdigest(), len(each)) for each in data]
    again = build_manifest(sealing, layout.files, layout.tensors, chunks)
    assert again == golden
    assert version_of(encode_manifest(again)) == VERSION
    inputs = inputs_digest(sealing, layout.files, layout.tensors, [chunk.digest for chunk in chunks])
    assert (ROOT / inputs_key(TENANT, inputs)).read_text() == VERSION


def test_it_has_what_the_format_has() -> None:
    """The golden snapshot has several packs, a tensor larger than a chunk, an empty one, and four dtypes."""
    found = manifest()
    assert len(list((ROOT / TENANT / "packs").iterdir())) > 1
    assert any(tensor.nbytes > found.chunk_bytes for tensor in found.tensors)
    assert any(tensor.nbytes == 0 for tensor in found.tensors)
    assert len({tensor.dtype for tensor in found.tensors}) == 4
    assert any(chunk.length == PAGE_BYTES for chunk in found.chunks)


@pytest.mark.parametrize("at", [0, 100, -1])
def test_flipped_manifest_bit_is_refused(at: int) -> None:
    """The control: flipping one bit of the manifest changes its digest."""
    raw = bytearray((ROOT / manifest_key(TENANT, VERSION)).read_bytes())
    raw[at] ^= 1
    assert version_of(bytes(raw)) != VERSION
