"""Reserved ranges are aligned, exact, and gone after `unmap`."""

import errno
import os
from pathlib import Path

import pytest

from tests.weightcache.disks import forget, needs_a_disk
from weightcache.client import libc
from weightcache.client.lease_protocol import HUGE_PAGE


def mapped_between(begin: int, end: int) -> int:
    """Bytes of this process's address space within the range that are mapped in any way."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        total += max(0, min(high, end) - max(low, begin))
    return total


@pytest.mark.parametrize("length", [1, 4096, HUGE_PAGE, 5 * HUGE_PAGE + 4096])
def test_reserve(length: int) -> None:
    """A range begins on a huge page's boundary, has whole pages and nothing around it, and is given back whole."""
    pages = -(-length // 4096) * 4096
    address = libc.reserve(length)
    assert address % HUGE_PAGE == 0
    assert mapped_between(address, address + pages) == pages
    libc.unmap(address, length)
    assert mapped_between(address, address + pages) == 0


def test_errors_have_their_number() -> None:
    """What the kernel refuses is an OSError that says why."""
    with pytest.raises(OSError, match="mmap") as refused:
        libc.map_shared(0, 4096, -1, 0, writable=False)
    assert refused.value.errno in (errno.EBADF, errno.EPERM)
    with pytest.raises(OSError, match="madvise") as refused:
        libc.advise(1, 4096, libc.MADV_POPULATE_WRITE)
    assert refused.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="mprotect") as refused:
        libc.protect(1, 4096, libc.PROT_READ)
    assert refused.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="munmap") as refused:
        libc.unmap(1, 4096)
    assert refused.value.errno == errno.EINVAL


@pytest.mark.parametrize("number", [None, errno.ENOSYS, errno.EPERM])
def test_missing_pages(tmp_path: Path, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page cache holds is told, by mincore too where cachestat can't, and looking changes nothing."""
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * 4096 + 1))
    needs_a_disk(path)
    if number is not None:

        def refuse(fd: int, length: int) -> int:
            raise OSError(number, "refused")

        monkeypatch.setattr(libc, "_cached_pages", refuse)
    with path.open("rb") as file:
        assert libc.missing_pages(file.fileno(), 5 * 4096 + 1) == 0
        assert libc.missing_pages(file.fileno(), 0) == 0
        forget(path)
        for _ in range(3):
            assert libc.missing_pages(file.fileno(), 5 * 4096 + 1) == 6


def test_missing_pages_of_no_file() -> None:
    """What can't be looked at is an error, and no answer."""
    with pytest.raises(OSError, match="cachestat"):
        libc.missing_pages(-1, 4096)


def test_view_and_zero() -> None:
    """A view reads and writes the mapping itself."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    address = libc.reserve(4096)
    libc.map_shared(address, 4096, fd, 0, writable=True)
    libc.view(address, 4)[:] = b"abcd"
    assert os.pread(fd, 4, 0) == b"abcd"
    libc.zero(address, 2)
    assert os.pread(fd, 4, 0) == b"\0\0cd"
    libc.unmap(address, 4096)
    os.close(fd)
