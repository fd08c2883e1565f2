"""A read gives the whole file or an error: cached, cold, without O_DIRECT, in parts, interrupted or shrinking."""

import errno
import fcntl
import mmap
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from tests.weightcache.disks import forget, needs_a_disk, refuse_direct
from weightcache.client import libc
from weightcache.nvme.chunk_files import ReadPath, read_start

LENGTH = 8 * PAGE_BYTES
BODY = random.Random(1).randbytes(LENGTH)
_preadv = os.preadv
_fcntl = fcntl.fcntl

Read = Callable[[int, list[memoryview], int], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "chunk"
    path.write_bytes(BODY)
    return path


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def read(path: Path, length: int = LENGTH) -> tuple[ReadPath, bytes]:
    into = memoryview(mmap.mmap(-1, length))
    with open_file(path) as fd:
        way = read_start(fd, into)
        assert not _fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT, "the descriptor's flags are restored"
    return way, bytes(into)


def is_cached(path: Path) -> bool:
    with open_file(path) as fd:
        return libc.missing_pages(fd, LENGTH) == 0


def is_direct(fd: int) -> bool:
    return bool(_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def set_cached(patch: pytest.MonkeyPatch, hot: bool) -> None:
    patch.setattr(libc, "missing_pages", lambda fd, length: 0 if hot else -(-length // PAGE_BYTES))


def refuse_read(patch: pytest.MonkeyPatch) -> None:
    """Make the file system take O_DIRECT and refuse the first read."""

    def refusing(fd: int, parts: list[memoryview], offset: int) -> int:
        if is_direct(fd):
            raise OSError(errno.EINVAL, "not so")
        return _preadv(fd, parts, offset)

    patch.setattr(os, "preadv", refusing)


def test_hot_and_cold(path: Path) -> None:
    """A cached file is copied from the page cache, and a cold one is read past it and stays cold."""
    needs_a_disk(path)
    assert read(path) == (ReadPath.CACHED, BODY)
    assert is_cached(path)
    forget(path)
    assert read(path) == (ReadPath.DIRECT, BODY)
    assert not is_cached(path)
    path.read_bytes()
    assert read(path) == (ReadPath.CACHED, BODY)


def test_cold_control(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a cold file that is taken for a cached one ends up in the page cache."""
    needs_a_disk(path)
    forget(path)
    with monkeypatch.context() as patch:
        set_cached(patch, hot=True)
        assert read(path) == (ReadPath.CACHED, BODY)
    assert is_cached(path)


@pytest.mark.parametrize(("pages", "way"), [(1, ReadPath.DIRECT), (6, ReadPath.DIRECT), (7, ReadPath.CACHED)])
def test_partly_cached_file_is_read_directly(path: Path, pages: int, way: ReadPath) -> None:
    """A partly cached file is read past the page cache, unless at most an eighth of it is missing."""
    needs_a_disk(path)
    forget(path)
    with open_file(path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for page in range(pages):
            os.pread(fd, PAGE_BYTES, page * PAGE_BYTES)
        assert libc.missing_pages(fd, LENGTH) == LENGTH // PAGE_BYTES - pages
    assert read(path) == (way, BODY)


@pytest.mark.parametrize("refuse", [refuse_direct, refuse_read])
def test_cold_file_without_o_direct_is_read_buffered(
    path: Path, refuse: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file system refuses O_DIRECT, a cold file is read through the page cache and reported as such."""
    set_cached(monkeypatch, hot=False)
    refuse(monkeypatch)
    assert read(path) == (ReadPath.BUFFERED, BODY)


@pytest.mark.parametrize("call", ["flag", "read"])
def test_other_errors_are_not_taken_for_a_refusal(path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error fails the read. The page cache is not tried."""

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    def flag(fd: int, command: int, *flags: int) -> int:
        return failing() if flags and flags[0] & os.O_DIRECT else _fcntl(fd, command, *flags)

    set_cached(monkeypatch, hot=False)
    monkeypatch.setattr(*((fcntl, "fcntl", flag) if call == "flag" else (os, "preadv", failing)))
    with pytest.raises(OSError, match="broken"):
        read(path)


def test_read_goes_on_without_o_direct(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If O_DIRECT is refused after the first pages, the rest is read through the page cache."""

    def refusing(fd: int, parts: list[memoryview], offset: int) -> int:
        if is_direct(fd) and offset:
            raise OSError(errno.EINVAL, "not there")
        return _preadv(fd, [parts[0][:PAGE_BYTES]], offset)

    set_cached(monkeypatch, hot=False)
    monkeypatch.setattr(os, "preadv", refusing)
    assert read(path) == (ReadPath.DIRECT, BODY)


@pytest.mark.parametrize("hot", [pytest.param(True, id="hot"), pytest.param(False, id="cold")])
@pytest.mark.parametrize("part", [pytest.param(PAGE_BYTES, id="pages"), pytest.param(100, id="less than a page")])
def test_short_reads(path: Path, hot: bool, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that come in parts give the whole file. After part of a page, no unaligned O_DIRECT read follows."""

    def piecemeal(fd: int, parts: list[memoryview], offset: int) -> int:
        assert offset % PAGE_BYTES == 0 or not is_direct(fd), "the kernel would refuse it"
        into = parts[0][:part]
        into[:] = BODY[offset : offset + len(into)]
        return len(into)

    set_cached(monkeypatch, hot)
    monkeypatch.setattr(os, "preadv", piecemeal)
    assert read(path)[1] == BODY


@pytest.mark.parametrize("length", [1, PAGE_BYTES - 1, PAGE_BYTES + 1, LENGTH - 1])
def test_odd_lengths(path: Path, length: int) -> None:
    """A last part that fills no page is read, too."""
    os.truncate(path, length)
    forget(path)
    assert read(path, length)[1] == BODY[:length]
    assert read(path, length)[1] == BODY[:length]


@pytest.mark.parametrize("hot", [pytest.param(True, id="hot"), pytest.param(False, id="cold")])
def test_a_file_that_shrinks(path: Path, hot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is truncated while it is read is an EOFError, never a whole file or a memory fault."""

    def shrinking(fd: int, parts: list[memoryview], offset: int) -> int:
        count = _preadv(fd, [parts[0][: 2 * PAGE_BYTES]], offset)
        os.truncate(path, 3 * PAGE_BYTES)
        return count

    set_cached(monkeypatch, hot)
    monkeypatch.setattr(os, "preadv", shrinking)
    with pytest.raises(EOFError):
        read(path)


def test_shrinking_control(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a reader that trusts the requested length returns wrong bytes for a truncated file."""

    def believing(fd: int, parts: list[memoryview], offset: int) -> int:
        os.truncate(path, 3 * PAGE_BYTES)
        _preadv(fd, parts, offset)
        return parts[0].nbytes

    monkeypatch.setattr(os, "preadv", believing)
    _, got = read(path)
    assert got != BODY
    assert got[: 3 * PAGE_BYTES] == BODY[: 3 * PAGE_BYTES]


def test_signals_do_not_disturb_a_read(path: Path) -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: signals.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        while len(signals) < 50:
            assert read(path)[1] == BODY
            forget(path)
            assert read(path)[1] == BODY
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
