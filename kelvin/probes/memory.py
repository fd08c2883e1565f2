"""Look at memory: sizes, swap, and whether the kernel gives huge pages to shared memory, by asking for one."""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

from kelvin.policy.machine import MemoryFacts
from kelvin.probes.kernel import cgroup_number, chosen, try_text

_HUGE: Final = 2 << 20
_POPULATE_WRITE: Final = 23  # Linux 5.14
_COLLAPSE: Final = 25  # Linux 6.1
_FIXED: Final = 0x10  # MAP_FIXED
_FAILED: Final = ctypes.c_void_p(-1).value
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")


def look_at_memory() -> MemoryFacts:
    """A few milliseconds."""
    fault = _collapse_fault()
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return MemoryFacts(
        collapsed=not fault,
        collapse_fault=fault,
        shmem_enabled=chosen(try_text(_THP / "shmem_enabled")),
        thp_enabled=chosen(try_text(_THP / "enabled")),
        total_bytes=sizes["MemTotal"],
        available_bytes=sizes.get("MemAvailable", sizes["MemFree"]),
        swap_bytes=sizes["SwapTotal"],
        cgroup_bytes=cgroup_number("memory.max"),
    )


def _collapse_fault() -> str:
    """Why a huge page of shared memory was refused; empty where it was given.

    Address and offset in the file have to be on a huge page's boundary both: the range is reserved first.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def fault() -> str:
        return os.strerror(ctypes.get_errno())

    fd = os.memfd_create("kelvin-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _HUGE)
        reserved = libc.mmap(None, 2 * _HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if reserved in (None, _FAILED):
            return fault()
        try:
            address = -(-reserved // _HUGE) * _HUGE
            shared = libc.mmap(address, _HUGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd, 0)
            if shared != address:
                return fault()
            for length, advice in ((4096, _POPULATE_WRITE), (_HUGE, _COLLAPSE)):
                if libc.madvise(address, length, advice) != 0:
                    return fault()
        finally:
            libc.munmap(reserved, 2 * _HUGE)
    finally:
        os.close(fd)
    return ""
