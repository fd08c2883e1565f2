"""Write and read the archive of a backup: a plain tar of regular files, which is read more strictly than by `tar`.

The last two members are `index.json`, which has the size and SHA-256 of all others, and `index.sha256`, its digest.
Headers depend on name and size alone, padding is zero, and nothing follows the end. So every changed bit is found, and
a truncated file has no index. A digest is no signature: a person who can write the file can write another one.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from kelvin.contracts.accounting.backup_reports import BACKUP_FORMAT, BackupIndex, BackupMember
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import decode, encode

INDEX: Final = "index.json"
SEAL: Final = "index.sha256"
_BLOCK: Final = tarfile.BLOCKSIZE
_PIECE: Final = 1 << 20
_END: Final = bytes(2 * _BLOCK)
_MAX_INDEX_BYTES: Final = 64 << 20  # an index, at most


class BadBackup(Exception):
    """The file is not a whole backup, or was changed. The text is the reason."""


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


@dataclass(slots=True)
class ArchiveWriter:
    """Writes an archive as a stream of pieces. `members` grows with each written file."""

    members: list[BackupMember] = field(default_factory=list)

    def file_pieces(self, name: str, source: BinaryIO, size: int) -> Iterator[bytes]:
        """Yield a member with exactly `size` bytes of `source`. Raises BadBackup if there are fewer."""
        yield _header(name, size)
        digest, left_bytes = hashlib.sha256(), size
        while left_bytes:
            piece = source.read(min(_PIECE, left_bytes))
            if not piece:
                raise BadBackup(f"{name} ended {left_bytes} bytes early")
            digest.update(piece)
            left_bytes -= len(piece)
            yield piece
        yield _padding(size)
        self.members.append(BackupMember(name=name, size=size, sha256=digest.hexdigest()))

    def content_pieces(self, name: str, content: bytes) -> Iterator[bytes]:
        """Yield a member with this content."""
        yield _header(name, len(content)) + content + _padding(len(content))
        self.members.append(BackupMember(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest()))

    def end_pieces(self, index: BackupIndex) -> Iterator[bytes]:
        """Yield the index, its digest, and the end of the archive."""
        raw = encode(index)
        yield from self.content_pieces(INDEX, raw)
        yield from self.content_pieces(SEAL, hashlib.sha256(raw).hexdigest().encode())
        yield _END


def unpack(archive: BinaryIO, into: Mapping[str, Path]) -> BackupIndex:
    """Write the members to the files that `into` names, and verify everything. Raises BadBackup.

    `into` lists all allowed members. Existing files are overwritten. After an error the files are worthless.
    """
    found: list[BackupMember] = []
    raw = seal = None
    while seal is None:
        name, size = _read_header(archive)
        if name in (INDEX, SEAL):
            if size > _MAX_INDEX_BYTES or (name == SEAL) != (raw is not None):
                raise BadBackup(f"{name} is out of place")
            content = _read(archive, size, name)
            _skip_padding(archive, size, name)
            if name == INDEX:
                raw = content
            else:
                seal = content
            continue
        if name not in into or raw is not None or any(member.name == name for member in found):
            raise BadBackup(f"it holds {name!r}, which no backup does at that place")
        found.append(_write(archive, name, size, into[name]))
    if archive.read(len(_END) + 1) != _END:
        raise BadBackup("its end is not where it should be")
    assert raw is not None
    if hashlib.sha256(raw).hexdigest().encode() != seal:
        raise BadBackup("its index is not what was written")
    index = _decode_index(raw)
    for member, indexed_member in zip(found, index.members, strict=False):
        if member != indexed_member:
            raise BadBackup(f"{indexed_member.name} is not what was written")
    if len(found) != len(index.members):
        raise BadBackup("a file is missing, or one too many")
    return index


def read_index(archive: BinaryIO) -> BackupIndex:
    """Return the index of a backup without checking its other files. Raises BadBackup, OSError."""
    while True:
        name, size = _read_header(archive)
        if name == INDEX:
            if size > _MAX_INDEX_BYTES:
                raise BadBackup(f"{name} is out of place")
            return _decode_index(_read(archive, size, name))
        archive.seek(size + len(_padding(size)), os.SEEK_CUR)


def _decode_index(raw: bytes) -> BackupIndex:
    try:
        index = decode(raw, BackupIndex, field="index of the backup")
    except Refused as refused:
        raise BadBackup(refused.failure.message) from refused
    if index.format != BACKUP_FORMAT:
        raise BadBackup(f"it has format {index.format}; this program reads {BACKUP_FORMAT}")
    return index


def _read_header(archive: BinaryIO) -> tuple[str, int]:
    """Return name and size of the next member. Raises BadBackup."""
    raw = archive.read(_BLOCK)
    if len(raw) < _BLOCK:
        raise BadBackup("it was cut short")
    try:
        entry = tarfile.TarInfo.frombuf(raw, "ascii", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise BadBackup("it was cut short, or is no backup") from error
    if entry.size < 0 or raw != _header(entry.name, entry.size):
        raise BadBackup(f"the header of {entry.name[:80]!r} is not what was written")
    return entry.name, entry.size


def _write(archive: BinaryIO, name: str, size: int, path: Path) -> BackupMember:
    digest, left_bytes = hashlib.sha256(), size
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("wb") as file:
        path.chmod(0o600)
        while left_bytes:
            piece = archive.read(min(_PIECE, left_bytes))
            if not piece:
                raise BadBackup(f"it was cut short in {name}")
            digest.update(piece)
            file.write(piece)
            left_bytes -= len(piece)
    _skip_padding(archive, size, name)
    return BackupMember(name=name, size=size, sha256=digest.hexdigest())


def _read(archive: BinaryIO, size: int, name: str) -> bytes:
    content = archive.read(size)
    if len(content) < size:
        raise BadBackup(f"it was cut short in {name}")
    return content


def _skip_padding(archive: BinaryIO, size: int, name: str) -> None:
    padding = _padding(size)
    if archive.read(len(padding)) != padding:
        raise BadBackup(f"something was written behind {name}")
