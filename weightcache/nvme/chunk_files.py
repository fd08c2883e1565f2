"""Chunk files on a disk: their paths, crash-safe writes (the whole file or none), and whole reads.

Blocking calls for threads. Callers check the content.

A cold file is read past the page cache (O_DIRECT): that saves a copy, and evicts no other pages. A file in the page
cache is copied from there at memory speed. The kernel tells how many pages of a file are missing. A file counts as
cached if at most one page in `PAGES_PER_MISSING_PAGE` is missing: kernels reclaim a few pages even of files in use.
"""

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.names import is_digest
from weightcache.client import libc
from weightcache.sources.policy.healing import ReadOutcome

STAGING: Final = ".staging"
QUARANTINE: Final = ".quarantine"
MAX_QUARANTINED: Final = 16  # the newest are kept for inspection
_MEDIA_ERRORS: Final = frozenset({errno.EIO, errno.EBADMSG, errno.ENODATA, errno.EUCLEAN})
PAGES_PER_MISSING_PAGE: Final = 8  # a cached file lacks at most one page in this many


class DocumentKind(StrEnum):
    """Documents of a version that are kept besides its chunks."""

    MANIFESTS = "manifests"
    ATTESTATIONS = "attestations"


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk file, as `ChunkFiles.scan` found it. `size` is in bytes, `used_at` in seconds since 1970."""

    tenant: str
    digest: str
    size: int
    used_at: float


class ReadPath(StrEnum):
    """How a file's bytes were read."""

    CACHED = "cached"  # from the page cache, which had nearly all of them
    DIRECT = "direct"  # past the page cache
    BUFFERED = "buffered"  # through the page cache, because the file system refuses O_DIRECT


def read_start(fd: int, into: memoryview, *, from_medium: bool = False) -> ReadPath:
    """Fill `into` (page-aligned) with the start of the file; with `from_medium`, past the page cache as far as
    possible. Raises OSError, and EOFError if the file is too short.
    """
    if not from_medium and libc.missing_pages(fd, into.nbytes) * PAGE_BYTES * PAGES_PER_MISSING_PAGE <= into.nbytes:
        _read_rest(fd, into, 0)
        return ReadPath.CACHED
    # A direct read covers whole pages. The rest is read through the cache: all of it, if O_DIRECT is refused.
    pages = into.nbytes // PAGE_BYTES * PAGE_BYTES
    offset = _read_direct(fd, into[:pages])
    if offset < into.nbytes:
        _read_rest(fd, into, offset)
    return ReadPath.DIRECT if offset else ReadPath.BUFFERED


def _read_rest(fd: int, into: memoryview, offset: int) -> None:
    while offset < into.nbytes:
        count = os.preadv(fd, [into[offset:]], offset)  # the interpreter repeats an interrupted read (PEP 475)
        if count == 0:
            raise EOFError
        offset += count


def _read_direct(fd: int, into: memoryview) -> int:
    """Return how many bytes were read before the file system refused O_DIRECT or returned a partial page."""
    offset = 0
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            while offset < into.nbytes and offset % PAGE_BYTES == 0:
                count = os.preadv(fd, [into[offset:]], offset)
                if count == 0:
                    raise EOFError
                offset += count
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return offset


@dataclass(frozen=True, slots=True)
class FileRead:
    """The outcome of a read, and how the bytes were read; None if none were."""

    outcome: ReadOutcome
    read_path: ReadPath | None = None


class ChunkFiles:
    """The files `root/<tenant>/<digest[:2]>/<digest>`, owned by one process at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staging = root / STAGING
        self._quarantine = root / QUARANTINE
        self._lock_fd = -1

    def __repr__(self) -> str:
        return f"<ChunkFiles {self._root}>"

    def open(self) -> None:
        """Lock the directory and remove half-written files. Raises BlockingIOError if another process has it."""
        self._staging.mkdir(parents=True, exist_ok=True)
        self._quarantine.mkdir(exist_ok=True)
        self._lock_fd = _open_lock(self._root / ".lock")
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise
        for path in self._staging.iterdir():
            with suppress(OSError):  # a file that stays does no harm
                if path.is_file():  # other entries are foreign
                    path.unlink()

    def close(self) -> None:
        """Unlock the directory. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def scan(self) -> Iterator[ChunkFile]:
        """Yield all files with names of chunks, whatever their content. Files that come or go now may be missing."""
        for path in self._list_files(None, lambda name: len(name) == 2):
            if not path.name.startswith(path.parts[-2]) or not is_digest(path.name):
                continue
            try:
                status = path.stat()
            except OSError:  # evicted meanwhile, or the disk fails: the chunk is fetched again
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            yield ChunkFile(path.parts[-3], path.name, status.st_size, _used_at_ns(path, status) / 1e9)

    def chunk_path(self, tenant: str, digest: str) -> Path:
        """Return the path of the chunk's file."""
        return self._root / tenant / digest[:2] / digest

    def size(self, tenant: str, digest: str) -> int | None:
        """Return the size of the chunk's file in bytes, or None if the disk does not have or report it."""
        try:
            return os.stat(self.chunk_path(tenant, digest)).st_size
        except OSError:
            return None

    def document_path(self, tenant: str, version: str, kind: DocumentKind) -> Path:
        """Return the path of the version's manifest or attestations."""
        return self._root / tenant / kind / version

    def read(self, path: Path, into: memoryview, *, touch: bool = True) -> FileRead:
        """Fill `into` (page-aligned) with the whole file, in the faster way, and mark it as recently used. Without
        `touch`, read it as `read_start` does with `from_medium`, and don't mark it. Raises `Refused(Unavailable)`.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return FileRead(ReadOutcome.MISSING)
        except OSError as error:
            return FileRead(_outcome_of(error))
        try:
            if os.fstat(fd).st_size != into.nbytes:
                return FileRead(ReadOutcome.LENGTH)
            read_path = read_start(fd, into, from_medium=not touch)
            if touch:
                with suppress(OSError):  # a read-only disk can still be read
                    os.utime(fd)  # recency survives this process
        except EOFError:
            return FileRead(ReadOutcome.SHORT)
        except OSError as error:
            return FileRead(_outcome_of(error))
        finally:
            os.close(fd)
        return FileRead(ReadOutcome.WHOLE, read_path)

    def write(self, path: Path, data: bytes | memoryview, *, direct: bool) -> None:
        """Write the file: bytes, sync, name. This order makes a crash harmless. Raises OSError. The name itself is not
        synced: a file lost in a power cut is fetched again.
        """
        staged = self._staging / secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = open_direct(staged, flags) if direct else os.open(staged, flags | os.O_CLOEXEC, 0o600)
            try:
                remaining = memoryview(data).cast("B")
                done = 0
                while done < remaining.nbytes:
                    done += os.pwritev(fd, [remaining[done:]], done)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            path.parent.mkdir(parents=True, exist_ok=True)
            staged.rename(path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    def documents(self, tenant: str | None, version: str | None) -> list[Path]:
        """Return the kept manifests and attestations of the tenant (None: all) and the version (None: any)."""
        found = self._list_files(tenant, lambda name: name in set(DocumentKind))
        return [path for path in found if version in (None, path.name) and _is_file(path)]

    def _list_files(self, tenant: str | None, is_kind: Callable[[str], bool]) -> Iterator[Path]:
        """Yield the entries of the tenant's (None: every tenant's) directories whose names `is_kind` accepts. A
        directory that can't be listed counts as empty, so its content is fetched again.
        """
        tenants = [self._root / tenant] if tenant else _list_entries(self._root)
        for kind in (path for each in tenants for path in _list_entries(each) if is_kind(path.name)):
            yield from _list_entries(kind)

    def trim_documents(self, newest: Path, limit_bytes: int) -> None:
        """Remove the least recently used documents until at most `limit_bytes` remain. Raises as `remove`. The newest
        one stays, whatever its size.
        """
        documents = []
        for path in self.documents(None, None):
            with suppress(OSError):  # deleted meanwhile
                status = path.stat()
                documents.append((path == newest, _used_at_ns(path, status), status.st_size, path))
        total, to_remove = 0, []
        for index, (_, _, size, path) in enumerate(sorted(documents, reverse=True)):
            total += size
            if index and total > limit_bytes:
                to_remove.append(path)
        self.remove(to_remove)

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove these files; some may not exist. Raises OSError if one stays, after removing the others."""
        last_error: OSError | None = None
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                last_error = error
        if last_error is not None:
            raise last_error

    def quarantine(self, path: Path, name: str) -> None:
        """Move a faulty file aside for inspection. It may not exist any more."""
        try:
            path.rename(self._quarantine / f"{name}.{secrets.token_hex(4)}")
        except FileNotFoundError:
            return
        quarantined = sorted(filter(Path.is_file, self._quarantine.iterdir()), key=_quarantined_at)
        self.remove(quarantined[:-MAX_QUARANTINED])


def open_direct(path: Path, flags: int) -> int:
    """Open past the page cache if the file system can, else normally (tmpfs before Linux 6.6)."""
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # A file system may create the file before it refuses O_DIRECT.
    return os.open(path, flags & ~os.O_EXCL, 0o600)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a read-only disk can still be served


def _list_entries(directory: Path) -> list[Path]:
    """Return the entries of a directory without hidden ones; none if it can't be listed."""
    try:
        return [directory / name for name in os.listdir(directory) if not name.startswith(".")]
    except OSError:
        return []


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the disk fails
        return False


def _used_at_ns(path: Path, status: os.stat_result) -> int:
    """Return when the file was last used. A future time, from a wrong clock, is replaced by now, in the file too."""
    now_ns = time.time_ns()
    if status.st_mtime_ns <= now_ns:
        return status.st_mtime_ns
    with suppress(OSError):  # a read-only disk removes no file either
        os.utime(path, ns=(now_ns, now_ns))
    return now_ns


def _quarantined_at(path: Path) -> int:
    try:
        return path.stat().st_ctime_ns
    except FileNotFoundError:  # removed by another thread
        return 0


def _outcome_of(error: OSError) -> ReadOutcome:
    if error.errno in _MEDIA_ERRORS:
        return ReadOutcome.UNREADABLE
    raise Refused(Unavailable("the NVMe tier of the weight cache")) from error
