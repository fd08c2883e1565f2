"""A store of files in one directory, for one machine. Several processes may use the directory at once.

A put writes and syncs a file in the hidden staging directory, then links it to its name. `link` refuses an existing
name, so exactly one put wins. A crash at any point leaves either nothing or the whole object under the key.
"""

import asyncio
import errno
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kelvin.blobstore.blob_store import (
    BadKey,
    BlobNotFound,
    BlobShort,
    BlobStat,
    BlobUnavailable,
    Payload,
    StoreFull,
    check_key,
    check_prefix,
    check_range,
    is_segment,
)
from kelvin.process.atomic_file import sync
from kelvin.process.thread_calls import run_uncancellable

STAGING: Final = ".staging"
# A live put writes to its file continuously, so an older file was left by a crash.
STALE_S: Final = 86_400.0


class FileStore:
    """A store in a directory. Objects are durable once a call returns. Reads, writes and syncs run on the event loop's
    default threads. A put of an iterator creates, closes and removes its staged file on the loop itself.
    """

    def __init__(self, root: Path, *, writes: bool = True) -> None:
        """Create `root` if missing. If this process `writes`, remove leftovers of crashed puts. Blocking. Raises
        OSError.
        """
        self._root = root
        self._staging = root / STAGING
        if writes:
            _ensure_directory(self._staging)
            _sweep(self._staging, older_than_s=time.time() - STALE_S)
            return
        _ensure_directory(root)
        if not os.access(root, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root))

    def __repr__(self) -> str:
        return f"<FileStore {self._root}>"

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        path = self._path(key)
        if isinstance(data, bytes):
            return await asyncio.to_thread(self._put_bytes, key, path, data)
        if await asyncio.to_thread(_exists_durably, key, path):
            return False
        with _translated(key, putting=True):
            staged, fd = self._stage()
        try:
            try:
                async for piece in data:
                    await run_uncancellable(None, _write_all, fd, piece, key)
                return await run_uncancellable(None, _publish, key, fd, staged, path)
            finally:
                os.close(fd)
        finally:
            staged.unlink(missing_ok=True)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return await asyncio.to_thread(_read, key, self._path(key), offset, length)

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        await run_uncancellable(None, _read_into, key, self._path(key), offset, into)

    async def stat(self, key: str) -> BlobStat:
        return await asyncio.to_thread(_stat, key, self._path(key))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        check_prefix(prefix)
        parent = prefix[: prefix.rfind("/") + 1]
        pending = [parent]  # keys, and directories (they end in "/") yet to be opened, the next one last
        while pending:
            name = pending.pop()
            if name and not name.endswith("/"):
                yield name
                continue
            inside = await asyncio.to_thread(_scan, self._root, name)
            pending += (entry for entry in reversed(inside) if entry.startswith(prefix))

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(_delete, key, self._path(key))

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _stage(self) -> tuple[Path, int]:
        staged = self._staging / secrets.token_hex(16)
        return staged, os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _put_bytes(self, key: str, path: Path, data: bytes) -> bool:
        if _exists_durably(key, path):
            return False
        with _translated(key, putting=True):
            staged, fd = self._stage()
        try:
            try:
                _write_all(fd, data, key)
                return _publish(key, fd, staged, path)
            finally:
                os.close(fd)
        finally:
            staged.unlink(missing_ok=True)


@contextmanager
def _translated(key: str, *, putting: bool = False) -> Iterator[None]:
    """Translate file system errors to the store's errors. In a put, FileNotFoundError is never `BlobNotFound`."""
    try:
        yield
    except FileNotFoundError as error:
        if putting:
            raise BlobUnavailable(f"a directory or staged file vanished under a put of '{key}'") from error
        raise BlobNotFound(key) from None
    except (IsADirectoryError, NotADirectoryError) as error:
        raise BadKey(key, "is a parent of another key, or the other way round") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull() from error
        raise BlobUnavailable(f"{errno.errorcode.get(error.errno or 0, 'error')} at '{key}'") from error


def _exists_durably(key: str, path: Path) -> bool:
    """Return whether the object exists, and make that durable: another put may have linked but not synced its name."""
    try:
        with _translated(key):
            if path.is_dir():
                raise BadKey(key, "is a parent of another key")
            path.stat()
            sync(path.parent)
    except BlobNotFound:
        return False
    return True


def _write_all(fd: int, data: bytes, key: str) -> None:
    with _translated(key, putting=True):
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]


def _publish(key: str, fd: int, staged: Path, path: Path) -> bool:
    """Sync the bytes, then the name. This order makes a crash harmless."""
    with _translated(key, putting=True):
        os.fdatasync(fd)
        _ensure_directory(path.parent)
        try:
            os.link(staged, path)
        except FileExistsError:
            return _exists_durably(key, path) and False
        sync(path.parent)
    return True


def _open(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if os.path.isdir(fd):
        os.close(fd)
        raise FileNotFoundError(path)
    return fd


def _read(key: str, path: Path, offset: int, length: int | None) -> bytes:
    with _translated(key):
        fd = _open(path)
        try:
            into = bytearray(check_range(key, os.fstat(fd).st_size, offset, length))
            _fill(fd, key, offset, memoryview(into))
        finally:
            os.close(fd)
    return bytes(into)


def _read_into(key: str, path: Path, offset: int, into: memoryview) -> None:
    with _translated(key):
        fd = _open(path)
        try:
            check_range(key, os.fstat(fd).st_size, offset, into.nbytes)
            _fill(fd, key, offset, into)
        finally:
            os.close(fd)


def _fill(fd: int, key: str, offset: int, into: memoryview) -> None:
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise BlobShort(key, offset, into.nbytes)
        done += count


def _stat(key: str, path: Path) -> BlobStat:
    with _translated(key):
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise FileNotFoundError(path)
        return BlobStat(found.st_size, found.st_mtime)


def _delete(key: str, path: Path) -> None:
    try:
        with _translated(key):
            if path.is_dir():
                return
            path.unlink()
            sync(path.parent)
    except BlobNotFound:
        return


def _scan(root: Path, parent: str) -> list[str]:
    """Return the names in one directory as keys, directories with a trailing slash, in the order of keys below."""
    try:
        with _translated(parent), os.scandir(root / parent) as entries:
            names = [
                parent + entry.name + ("/" if _is_directory(entry) else "")
                for entry in entries
                if is_segment(entry.name)
            ]
    except (BlobNotFound, BadKey):
        return []
    return sorted(names)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link to itself


def _ensure_directory(path: Path) -> None:
    """Create `path` and its missing parents. Sync each name in its parent."""
    if path.is_dir():
        return
    _ensure_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file is in the way") from None
    sync(path.parent)


def _sweep(staging: Path, older_than_s: float) -> None:
    """Remove staged files of crashed puts. Files of live puts are younger."""
    for path in staging.iterdir():
        try:
            if path.is_file() and path.stat().st_mtime < older_than_s:
                path.unlink()
        except OSError:
            continue  # another process may sweep too; a file that stays does no harm
