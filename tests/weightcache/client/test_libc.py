"""The wrappers of system calls: reserved ranges, errors, page cache queries, and views."""

import errno
import os
from pathlib import Path

import pytest

from tests.weightcache.disks import forget, needs_a_disk
from weightcache.client import libc
from weightcache.client.lease_protocol import HUGE_PAGE


def mapped_between(begin: int, end: int) -> int:
    """Return how many bytes of this range are mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        total += max(0, min(high, end) - max(low, begin))
    return total


@pytest.mark.parametrize("length", [1, 4096, HUGE_PAGE, 5 * HUGE_PAGE + 4096])
def test_reserved_range_begins_at_a_huge_page(length: int) -> None:
    """A range begins at a huge page, has whole pages, and is unmapped whole."""
    pages = -(-length // 4096) * 4096
    address = libc.reserve(length)
    assert address % HUGE_PAGE == 0
    assert mapped_between(address, address + pages) == pages
    libc.unmap(address, length)
    assert mapped_between(address, address + pages) == 0


def test_errors_have_their_number() -> None:
    """An error of a system call is an OSError with its name and number."""
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
    """The number of missing pages comes from cachestat, or from mincore without it. The query loads no page."""
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


def test_missing_pages_of_a_bad_descriptor_raises() -> None:
    """A file that can't be queried is an error."""
    with pytest.raises(OSError, match="cachestat"):
        libc.missing_pages(-1, 4096)


def test_view_and_zero() -> None:
    """A view and `zero` access the mapping itself."""
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
