"""The local files of a push: a directory or a tensorizer file. Reads it by pieces and detects changes.

The snapshotter decides which files it accepts. This module checks only what is visible on this machine: links, file
types, changes. Beside a tensorizer file, only pinned files are pushed. The file's own hashes are checked before
anything is sent, because the tensorizer library loads truncated or corrupt files without an error.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from kelvin.cli.artifacts.progress import Progress
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.object_keys import TENSORS_SUFFIX
from kelvin.contracts.artifacts.push_api import PlannedChunk, PlanRequest, SmallFile, WeightsFile, WholeFile
from kelvin.contracts.errors import InvalidRequest, Refused
from snapshotter.intake.policy.file_roles import (
    INDEX_FILE,
    MAX_PATHS,
    PINNED,
    PREDICTOR,
    FileRole,
    check_paths,
    choose_weights,
    find_path_fault,
    is_predictor,
    max_bytes_of,
    role_of,
)
from snapshotter.intake.policy.intake import indexed_files
from snapshotter.intake.policy.safetensors_header import PREFIX_BYTES, header_bytes
from snapshotter.intake.policy.tensors_index import END_BYTES, ContentCheck, IndexEntry, index_end, parse_index
from snapshotter.intake.policy.tensors_index import PREFIX_BYTES as TENSORS_PREFIX_BYTES

_COPY_HINT: Final = "copy the file itself (from a Hugging Face cache: `hf download REPO --local-dir DIR`, or `cp -rL`)"
_BLOCK: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Values that change when a file is written or replaced."""

    device: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file below `root` that is pushed. `head` is a weights file's header, or all of a small file."""

    root: Path
    path: str
    identity: FileStamp
    head: bytes
    whole: WholeFile | None = None  # set if the store is to keep the file unchanged


@dataclass(frozen=True, slots=True)
class PushSource:
    """The files to push, as they were during the scan."""

    small: tuple[SourceFile, ...]
    weights: tuple[SourceFile, ...]
    ignored_paths: tuple[str, ...]  # harmless files that are not pushed; skipped directories end in "/"

    def request(self, model: str) -> PlanRequest:
        """Return the plan request for the snapshotter."""
        return PlanRequest(
            model=model,
            small_files=tuple(SmallFile(path=file.path, content=file.head) for file in self.small),
            weights=tuple(
                WeightsFile(path=file.path, size=file.identity.size, header=file.head, whole=file.whole)
                for file in self.weights
            ),
            other_paths=tuple(path for path in self.ignored_paths if not path.endswith("/")),
        )

    def read_chunk(self, chunk: PlannedChunk) -> bytes:
        """Return the chunk's bytes. Raises `Refused(ArtifactRejected)` if a file changed since the scan."""
        known = {file.path: file for file in (*self.small, *self.weights)}
        data = bytearray(chunk.length)  # padding stays zero
        at = 0
        for piece in chunk.pieces:
            with open_regular_file(known[piece.path].root, piece.path) as fd:
                _check_same(known[piece.path], fd)
                read_into(fd, piece.offset, memoryview(data)[at : at + piece.length], piece.path)
            at += piece.length + piece.pad
        return bytes(data)

    def check_unchanged(self) -> None:
        """Raise `Refused(ArtifactRejected)` if a file was written or replaced since the scan."""
        for file in (*self.small, *self.weights):
            with open_regular_file(file.root, file.path) as fd:
                _check_same(file, fd)
                head = bytearray(len(file.head))
                read_into(fd, 0, memoryview(head), file.path)
                if head != file.head:
                    raise _changed_failure(file.path)


def scan(directory: Path) -> PushSource:
    """Check every name, read the small files and the headers. Raises `Refused` for files that may not be pushed."""
    if not directory.is_dir():
        raise Refused(InvalidRequest("directory", str(directory), "is not a directory"))
    root = directory.resolve()
    files, unentered = _walk(root)
    check_paths(files)
    if is_predictor(files):
        whole = tuple(read_small_file(root, path) for path in files if path in PREDICTOR)
        return PushSource(whole, (), tuple(path for path in files if path not in PREDICTOR) + unentered)
    small = [read_small_file(root, path) for path in files if role_of(path) in (FileRole.PINNED, FileRole.INDEX)]
    index = next((file.head for file in small if file.path == INDEX_FILE), None)
    candidates = [path for path in files if role_of(path) is FileRole.WEIGHTS]
    chosen = choose_weights(candidates, None if index is None else indexed_files(index))
    weights = [_weights_file(root, path) for path in chosen]
    pushed = {file.path for file in (*small, *weights)}
    ignored_paths = tuple(path for path in files if path not in pushed)
    return PushSource(tuple(small), tuple(weights), ignored_paths + unentered)


def _walk(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files below `root` in name order, and skipped directories (hidden ones and links)."""
    files: list[str] = []
    unentered: list[str] = []
    for parent, directories, names in os.walk(root, onerror=_raise):
        inside = os.path.relpath(parent, root)
        prefix = "" if inside == "." else f"{inside}/"
        for name in sorted(directories):
            link = os.path.islink(os.path.join(parent, name))
            if link:
                check_link(root, prefix + name)
            if link or name.startswith("."):  # hidden: metadata of version control or of a download tool
                directories.remove(name)
                unentered.append(f"{prefix}{name}/")
        for name in names:
            if os.path.islink(os.path.join(parent, name)):
                check_link(root, prefix + name)
            files.append(prefix + name)
        if len(files) > MAX_PATHS:
            raise Refused(InvalidRequest("directory", str(root), f"holds more than {MAX_PATHS} files"))
    return tuple(sorted(files)), tuple(sorted(unentered))


def _raise(error: OSError) -> None:
    raise Refused(InvalidRequest("directory", str(error.filename), error.strerror or "can't be read")) from error


def check_link(root: Path, path: str) -> None:
    """Raise `Refused(ArtifactRejected)` if the link leads out of `root`, or nowhere."""
    target = Path(os.path.realpath(root / path))
    if not target.is_relative_to(root):
        raise Refused(ArtifactRejected(path, f"it is a link out of the directory; {_COPY_HINT}"))
    if not target.exists():
        raise Refused(ArtifactRejected(path, "it is a link to nothing"))


def read_small_file(root: Path, path: str) -> SourceFile:
    """Read a whole small file. Raises `Refused(ArtifactRejected)` if it is too large or can't be read."""
    with open_regular_file(root, path) as fd:
        identity = file_stamp_of(fd)
        if identity.size > max_bytes_of(path):
            rule = f"it has {identity.size} bytes; the limit is {max_bytes_of(path)}"
            raise Refused(ArtifactRejected(path, rule))
        content = bytearray(identity.size)
        read_into(fd, 0, memoryview(content), path)
    return SourceFile(root, path, identity, bytes(content))


def _weights_file(root: Path, path: str) -> SourceFile:
    with open_regular_file(root, path) as fd:
        identity = file_stamp_of(fd)
        length = header_bytes(os.pread(fd, PREFIX_BYTES, 0), identity.size, path)
        head = bytearray(length)
        read_into(fd, 0, memoryview(head), path)
    return SourceFile(root, path, identity, bytes(head))


@contextmanager
def open_regular_file(root: Path, path: str) -> Iterator[int]:
    """Open a regular file and yield its descriptor. Never blocks on a named pipe."""
    try:
        fd = os.open(root / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Refused(ArtifactRejected(path, f"it can't be read: {error.strerror}")) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refused(ArtifactRejected(path, "it is not a regular file"))
        yield fd
    finally:
        os.close(fd)


def file_stamp_of(fd: int) -> FileStamp:
    """Return the stamp of an open file."""
    found = os.fstat(fd)
    return FileStamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _check_same(file: SourceFile, fd: int) -> None:
    if file_stamp_of(fd) != file.identity:
        raise _changed_failure(file.path)


def _changed_failure(path: str) -> Refused:
    return Refused(ArtifactRejected(path, "it changed while it was being pushed; nothing was published: push again"))


def read_into(fd: int, offset: int, into: memoryview, path: str) -> None:
    """Fill all of `into`. Raises `Refused(ArtifactRejected)` if the file ends first or can't be read."""
    done = 0
    while done < into.nbytes:
        try:
            count = os.preadv(fd, [into[done:]], offset + done)
        except OSError as error:
            raise Refused(ArtifactRejected(path, f"it can't be read: {error.strerror}")) from error
        if count == 0:
            raise _changed_failure(path)
        done += count


def is_tensors(path: Path) -> bool:
    """Return whether `path` is a tensorizer file."""
    return path.name.endswith(TENSORS_SUFFIX) and path.is_file()


@dataclass(frozen=True, slots=True)
class TensorsOptions:
    """Options of a tensorizer file. `beside` is the directory of the small files (None: the file's own). With `repack`
    the store keeps only the tensors, else the whole file.
    """

    beside: Path | None = None
    repack: bool = False


def scan_tensors(file: Path, tensors_options: TensorsOptions, progress: Progress) -> PushSource:
    """Read the tensorizer file and the pinned files. Raises `Refused`."""
    directory = file.absolute().parent if tensors_options.beside is None else tensors_options.beside.absolute()
    if not directory.is_dir():
        raise Refused(InvalidRequest("with", str(directory), "is not a directory"))
    root = directory.resolve()
    small = []
    for path in sorted(PINNED & {entry.name for entry in os.scandir(root)}):
        if (root / path).is_symlink():
            check_link(root, path)
        small.append(read_small_file(root, path))
    return PushSource(tuple(small), (_weights(file, tensors_options.repack, progress),), ())


def _weights(file: Path, repack: bool, progress: Progress) -> SourceFile:
    root, name = file.absolute().parent, file.name
    if (fault := find_path_fault(name)) is not None:
        raise Refused(ArtifactRejected(repr(name[:80]), fault))
    with open_regular_file(root, name) as fd:
        identity = file_stamp_of(fd)
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
    whole_file = None if repack else WholeFile(digest=whole.hexdigest(), between=bytes(between + end))
    return SourceFile(root, name, identity, bytes(head), whole_file)


def _check_content(fd: int, name: str, entry: IndexEntry, whole: blake3, progress: Progress) -> bytearray:
    """Check the tensor's own hash, update `whole`, and return the header. Raises `Refused(ArtifactRejected)`."""
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
