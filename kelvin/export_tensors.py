"""A version as a tensorizer file: the one that was pushed, held against its digest; else one that the library writes of
a safetensors file in a process of its own, read again by our reader.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from blake3 import blake3

from contracts.artifact_errors import ChunkCorrupt
from contracts.errors import CapacityExceeded, InvalidRequest, Refused
from contracts.manifest import Manifest
from contracts.push import Original
from snapshotter.policy.safetensors_header import PREFIX_BYTES as SAFETENSORS_PREFIX
from snapshotter.policy.safetensors_header import SourceTensor, header_bytes, parse_header
from snapshotter.policy.tensors_index import (
    INDEX_BYTES,
    PREFIX_BYTES,
    ContentCheck,
    Entry,
    index_bytes,
    index_end,
    parse_index,
)

LIBRARY_S: Final = 4 * 3600.0
PROGRAM: Final = ("-m", "snapshotter.tensorizer_file")
_NOT_INSTALLED: Final = 3
_BLOCK: Final = 8 << 20


def check_fits(manifest: Manifest) -> None:
    """The library's index has a fixed size, and holds tensors. Raises `Refused` before anything travels:
    CapacityExceeded, InvalidRequest."""
    if manifest.signature is not None:
        raise Refused(InvalidRequest("format", "tensors", "this version is a graph: export it as it was pushed"))
    need = sum(index_bytes(tensor.name, tensor.dtype, tensor.shape) for tensor in manifest.tensors)
    if need > INDEX_BYTES:
        raise Refused(CapacityExceeded("bytes of a .tensors file's index", need, INDEX_BYTES))


def check_original(path: Path, original: Original, manifest: Manifest) -> None:
    """It is the file whose digest was taken at its push, and names the version's tensors. Raises `Refused`."""
    whole = blake3(max_threads=1)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            whole.update(block)
        if whole.hexdigest() != original.digest:
            raise Refused(ChunkCorrupt(original.digest, "transit"))
        entries = read_index(file.fileno(), path.name)
    if not _names_tensors_of(entries, manifest):
        raise Refused(InvalidRequest("format", "tensors", "the file that was pushed holds other tensors"))


def _names_tensors_of(entries: Sequence[Entry], manifest: Manifest) -> bool:
    facts = {each.tensor.name: (each.tensor.dtype, each.tensor.shape) for each in entries}
    return facts == {each.name: (each.dtype, each.shape) for each in manifest.tensors}


def convert(source: Path, target: Path, manifest: Manifest) -> None:
    """Write `target`, compare each tensor with `source` and with the manifest, remove `source`. Raises `Refused`."""
    command = [sys.executable, *PROGRAM, str(source), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIBRARY_S)
    except subprocess.TimeoutExpired:
        raise _failed(f"took longer than {LIBRARY_S:g} s") from None
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if done.returncode == _NOT_INSTALLED:
        raise _failed(f"{last}: `pip install 'kelvin-serving[tensorizer]'`")
    if done.returncode:
        raise _failed(last[:200])
    _compare(source, target, manifest)
    source.unlink()


def _compare(source: Path, target: Path, manifest: Manifest) -> None:
    with ExitStack() as stack:
        ours, theirs = (_opened(stack, path) for path in (source, target))
        size = os.fstat(ours).st_size
        head = os.pread(ours, header_bytes(os.pread(ours, SAFETENSORS_PREFIX, 0), size, source.name), 0)
        wanted = {tensor.name: tensor for tensor in parse_header(source.name, head, size)}
        entries = read_index(theirs, target.name)
        if not _names_tensors_of(entries, manifest):
            raise _failed("wrote other tensors than it was given")
        for entry in entries:
            if not _is_same(ours, wanted[entry.tensor.name], theirs, entry):
                raise _failed(f"wrote other bytes of tensor {entry.tensor.name[:80]!r} than it was given")


def read_index(fd: int, path: str) -> tuple[Entry, ...]:
    """The index of an open tensorizer file. Raises `Refused(ArtifactRejected)`."""
    size = os.fstat(fd).st_size
    return parse_index(path, os.pread(fd, index_end(os.pread(fd, PREFIX_BYTES, 0), size, path), 0), size)


def _is_same(ours: int, tensor: SourceTensor, theirs: int, entry: Entry) -> bool:
    """Whether both files hold the same bytes of it, and the header of theirs is right about them."""
    header = os.pread(theirs, entry.tensor.offset - entry.header_offset, entry.header_offset)
    check = ContentCheck(entry.tensor.path, entry, header)
    for at in range(0, tensor.nbytes, _BLOCK):
        length = min(_BLOCK, tensor.nbytes - at)
        data = os.pread(theirs, length, entry.tensor.offset + at)
        if len(data) != length or data != os.pread(ours, length, tensor.offset + at):
            return False
        check.update(data)
    check.finish()
    return True


def _opened(stack: ExitStack, path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _failed(why: str) -> Refused:
    return Refused(InvalidRequest("format", "tensors", f"tensorizer {why}"))
