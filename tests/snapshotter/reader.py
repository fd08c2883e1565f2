"""An independent reader of a store directory. It uses keys, JSON and BLAKE3, and no code that writes the store."""

import json
from pathlib import Path

from blake3 import blake3


def chunks_of(root: Path, tenant: str) -> dict[str, bytes]:
    """Return every chunk that an index names and whose bytes match."""
    found: dict[str, bytes] = {}
    for index in _files(root / tenant / "index"):
        pack = root / tenant / "packs" / index.name
        if not pack.exists():
            continue
        data = pack.read_bytes()
        for digest, spans in spans_of(index):
            chunk = b"".join(_padded(data[offset : offset + length]) for offset, length in spans)
            if blake3(chunk).hexdigest() == digest:
                found[digest] = chunk
    return found


def spans_of(index: Path) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return each chunk of a pack, with the ranges of the pack that it is made of."""
    table = json.loads(index.read_bytes())
    if index.name.endswith(".tensors"):
        return [(digest, [(offset, length) for offset, length in spans]) for digest, spans in table["chunks"]]
    return [(digest, [(offset, length)]) for digest, offset, length in table]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4096)


def versions_of(root: Path, tenant: str) -> list[str]:
    """Return the versions that a reader can see."""
    return [path.name for path in _files(root / tenant / "manifests")]


def assert_whole(root: Path, tenant: str) -> None:
    """Assert that every visible version is whole: manifest and chunks exist and match, and there is an attestation."""
    chunks = chunks_of(root, tenant)
    for version in versions_of(root, tenant):
        read_version(root, tenant, version, chunks)
        assert _files(root / tenant / "attestations" / version), f"{version} was never sealed"


def read_version(
    root: Path, tenant: str, version: str, chunks: dict[str, bytes] | None = None, kind: str = "manifests"
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return pinned files by path and tensors' bytes by name. Raises AssertionError or KeyError if one is missing."""
    chunks = chunks_of(root, tenant) if chunks is None else chunks
    raw = (root / tenant / kind / version).read_bytes()
    assert blake3(raw).hexdigest() == version
    manifest = json.loads(raw)
    space = b"".join(chunks[chunk["digest"]] for chunk in manifest["chunks"])
    files = {file["path"]: space[file["offset"] : file["offset"] + file["size"]] for file in manifest["files"]}
    for file in manifest["files"]:
        assert blake3(files[file["path"]]).hexdigest() == file["digest"]
    tensors = {}
    for tensor in manifest["tensors"]:
        nbytes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}.get(tensor["dtype"], 1)
        for extent in tensor["shape"]:
            nbytes *= extent
        tensors[tensor["name"]] = space[tensor["offset"] : tensor["offset"] + nbytes]
        assert len(tensors[tensor["name"]]) == nbytes
    return files, tensors


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if not path.name.startswith("."))
