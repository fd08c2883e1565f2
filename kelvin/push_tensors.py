"""A tensorizer file on its way to becoming a version, with the small files that lie beside it, or where one says.

Its own hashes are checked before anything is sent: the library that wrote it reads what is cut or flipped without a
word. What may enter is the snapshotter's policy; which of a directory's other files there are is not asked.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import InvalidRequest, Refused
from contracts.keys import TENSORS_SUFFIX
from contracts.push import WholeFile
from kelvin.progress import Progress
from kelvin.push_directory import Source, SourceFile, check_link, identity_of, opened, read_into, small_file
from snapshotter.policy.files import PINNED, find_path_fault
from snapshotter.policy.tensors_index import PREFIX_BYTES as TENSORS_PREFIX_BYTES
from snapshotter.policy.tensors_index import (
    END_BYTES,
    ContentCheck,
    Entry,
    index_end,
    parse_index,
)

_BLOCK: Final = 8 << 20


def is_tensors(path: Path) -> bool:
    """Whether this is a file to push, and no directory."""
    return path.name.endswith(TENSORS_SUFFIX) and path.is_file()


@dataclass(frozen=True, slots=True)
class TensorsWish:
    """Where the small files are, unless beside it; with `repack` the store keeps only its tensors, else all of it."""

    beside: Path | None = None
    repack: bool = False


def scan_tensors(file: Path, wish: TensorsWish, progress: Progress) -> Source:
    """Look at the file and at the pinned files. Raises `Refused`."""
    directory = file.absolute().parent if wish.beside is None else wish.beside.absolute()
    if not directory.is_dir():
        raise Refused(InvalidRequest("with", str(directory), "is not a directory"))
    root = directory.resolve()
    small = []
    for path in sorted(PINNED & {entry.name for entry in os.scandir(root)}):
        if (root / path).is_symlink():
            check_link(root, path)
        small.append(small_file(root, path))
    return Source(tuple(small), (_weights(file, wish.repack, progress),), ())


def _weights(file: Path, repack: bool, progress: Progress) -> SourceFile:
    root, name = file.absolute().parent, file.name
    if (fault := find_path_fault(name)) is not None:
        raise Refused(ArtifactRejected(repr(name[:80]), fault))
    with opened(root, name) as fd:
        identity = identity_of(fd)
        head = bytearray(index_end(os.pread(fd, TENSORS_PREFIX_BYTES, 0), identity.size, name))
        read_into(fd, 0, memoryview(head), name)
        entries = parse_index(name, bytes(head), identity.size)
        progress.begin("checking", identity.size)
        whole, between = blake3(head, max_threads=1), bytearray()
        for entry in entries:
            between += _check_content(fd, name, entry, whole, progress)
        end = bytearray(END_BYTES)
        read_into(fd, identity.size - END_BYTES, memoryview(end), name)
        whole.update(end)
    kept = None if repack else WholeFile(digest=whole.hexdigest(), between=bytes(between + end))
    return SourceFile(root, name, identity, bytes(head), kept)


def _check_content(fd: int, name: str, entry: Entry, whole: blake3, progress: Progress) -> bytearray:
    """The tensor's own hash; `whole` takes in what is read. Returns the header. Raises `Refused(ArtifactRejected)`."""
    header = bytearray(entry.tensor.offset - entry.header_offset)
    read_into(fd, entry.header_offset, memoryview(header), name)
    check = ContentCheck(name, entry, bytes(header))
    whole.update(header)
    block = memoryview(bytearray(min(_BLOCK, entry.tensor.nbytes)))
    for at in range(0, entry.tensor.nbytes, _BLOCK):
        part = block[: min(_BLOCK, entry.tensor.nbytes - at)]
        read_into(fd, entry.tensor.offset + at, part, name)
        check.update(part)
        whole.update(part)
        progress.advance(len(part))
    check.finish()
    return header
