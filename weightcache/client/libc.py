"""System calls that Python's `mmap` lacks, and the seals of shared memory.

The calls reserve address ranges, map at fixed places, advise and protect any range, and count cached pages of a file.
Addresses are integers. The caller that maps a range must unmap it.
"""

import ctypes
import errno
import fcntl
import os
from typing import Final

from weightcache.client.lease_protocol import HUGE_PAGE

PROT_NONE: Final = 0
PROT_READ: Final = 1
PROT_READ_WRITE: Final = 3
MADV_NOHUGEPAGE: Final = 15
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
MADV_COLLAPSE: Final = 25  # Linux 6.1
F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1
# On a slab F_SEAL_WRITE would be refused while the agent's mapping lives, and could not be undone.
SLAB_SEALS: Final = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
DOCUMENT_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_MAP_SHARED: Final = 0x01
_MAP_PRIVATE: Final = 0x02
_MAP_FIXED: Final = 0x10
_MAP_ANONYMOUS: Final = 0x20
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_CACHESTAT: Final = 451  # Linux 6.5; the same number on every architecture
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

_libc: Final = ctypes.CDLL(None, use_errno=True)  # releases the GIL in each call
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.syscall.restype = ctypes.c_long


def reserve(length: int) -> int:
    """Reserve `length` bytes of address space without access, from a 2 MiB boundary. Raises OSError."""
    length = _pages(length)
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    begin = _mapped(_libc.mmap(None, length + HUGE_PAGE, PROT_NONE, flags, -1, 0))
    address = -(-begin // HUGE_PAGE) * HUGE_PAGE
    if address > begin:
        unmap(begin, address - begin)
    if address < begin + HUGE_PAGE:
        unmap(address + length, begin + HUGE_PAGE - address)
    return address


def map_shared(address: int, length: int, fd: int, offset: int, *, writable: bool) -> None:
    """Map `length` bytes of the file from `offset` at `address`, inside a reserved range. Raises OSError."""
    protection = PROT_READ_WRITE if writable else PROT_READ
    _mapped(_libc.mmap(address, length, protection, _MAP_SHARED | _MAP_FIXED, fd, offset))


def protect(address: int, length: int, protection: int) -> None:
    """Set the access protection of a mapped range. Raises OSError."""
    if _libc.mprotect(address, length, protection) != 0:
        _fail("mprotect")


def unmap(address: int, length: int) -> None:
    """Unmap a range. Raises OSError."""
    if _libc.munmap(address, _pages(length)) != 0:
        _fail("munmap")


def advise(address: int, length: int, advice: int) -> None:
    """Call `madvise(2)`. Raises OSError."""
    if _libc.madvise(address, length, advice) != 0:
        _fail("madvise")


def view(address: int, length: int) -> memoryview:
    """Return the bytes at `address`, writable if the mapping is. The caller keeps the mapping alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def zero(address: int, length: int) -> None:
    """Overwrite the range with zero bytes."""
    ctypes.memset(address, 0, length)


def missing_pages(fd: int, length: int) -> int:
    """Return how many pages of the file's first `length` bytes are not in the page cache. Reads and drops no page. A
    read with RWF_NOWAIT would also tell, but then the kernel reads missing pages ahead. Raises OSError.
    """
    pages = -(-length // _PAGE)
    try:
        return max(0, pages - _cached_pages(fd, length))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
            raise
    return 0 if length == 0 else pages - _mapped_pages(fd, length)


def _cached_pages(fd: int, length: int) -> int:
    """Return the cached pages by `cachestat(2)`: one call, without a mapping."""
    wanted = (ctypes.c_uint64 * 2)(0, length)
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, written back, evicted, recently evicted
    number, no_flags = ctypes.c_long(_CACHESTAT), ctypes.c_uint(0)
    if _libc.syscall(number, ctypes.c_uint(fd), ctypes.byref(wanted), ctypes.byref(found), no_flags) != 0:
        _fail("cachestat")
    return int(found[0])


def _mapped_pages(fd: int, length: int) -> int:
    """Return the cached pages by `mincore(2)`, for older kernels. Counts all pages of another user's file."""
    address = _mapped(_libc.mmap(None, length, PROT_READ, _MAP_SHARED, fd, 0))
    try:
        pages = ctypes.create_string_buffer(-(-length // _PAGE))
        if _libc.mincore(address, length, pages) != 0:
            _fail("mincore")
        return sum(byte & 1 for byte in pages.raw)
    finally:
        unmap(address, length)


def _pages(length: int) -> int:
    return -(-length // _PAGE) * _PAGE


def _mapped(address: int | None) -> int:
    if address is None or address == _MAP_FAILED:
        _fail("mmap")
    return int(address or 0)


def _fail(call: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}")
