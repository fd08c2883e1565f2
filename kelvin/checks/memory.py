"""Check memory: sizes, swap, and whether the kernel gives huge pages to shared memory, by asking for one."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kelvin.checks.kernel import cgroup_number, chosen, try_text
from kelvin.policy.findings import GB, Finding, Level, as_bytes

_HUGE: Final = 2 << 20
_POPULATE_WRITE: Final = 23  # Linux 5.14
_COLLAPSE: Final = 25  # Linux 6.1
_FIXED: Final = 0x10  # MAP_FIXED
_FAILED: Final = ctypes.c_void_p(-1).value
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")


def check_memory() -> Iterator[Finding]:
    """Huge pages, size, swap. A few milliseconds."""
    modes = f"shmem_enabled {chosen(try_text(_THP / 'shmem_enabled'))}, THP {chosen(try_text(_THP / 'enabled'))}"
    yield judge_huge_pages(_collapse_fault(), modes)
    sizes = _sizes()
    available = sizes.get("MemAvailable", sizes["MemFree"])
    yield judge_size(sizes["MemTotal"], available, cgroup_number("memory.max"))
    yield judge_swap(sizes["SwapTotal"])


def usable_bytes() -> int:
    """The machine's memory, or what its control group has of that."""
    return _usable(_sizes()["MemTotal"], cgroup_number("memory.max"))


def _usable(total_bytes: int, cgroup_bytes: int | None) -> int:
    return min(total_bytes, cgroup_bytes or total_bytes)


def _sizes() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def judge_huge_pages(fault: str, modes: str) -> Finding:
    """`fault` is why shared memory was not brought into a huge page; empty where it was."""
    if not fault:
        return Finding("huge pages", Level.OK, f"MADV_COLLAPSE of shared memory works; {modes}")
    cost = "the host tier is filled 3 to 4 times slower, and a replica's first touch of 0.5 GB takes 54 ms, not 9"
    mend = "Linux 6.1 or later; echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; free memory"
    return Finding("huge pages", Level.WARN, f"refused: {fault}; {modes}", cost, mend)


def judge_size(total_bytes: int, available_bytes: int, cgroup_bytes: int | None) -> Finding:
    """`cgroup_bytes` is None where the control group has no limit."""
    bound = _usable(total_bytes, cgroup_bytes)
    seen = f"{as_bytes(available_bytes)} of {as_bytes(total_bytes)} available"
    if cgroup_bytes is not None:
        seen += f", control group {as_bytes(cgroup_bytes)}"
    tier = f"the host tier is {as_bytes(bound / 4)} unless KELVIN_HOST_BYTES says otherwise"
    if bound < 2 * GB:
        cost = "services and zygote alone take 0.5 GB: no model fits"
        return Finding("memory", Level.FAIL, seen, cost, "more memory")
    if available_bytes * 4 < bound:
        cost = f"{tier}, more than is available: starts wait for memory"
        return Finding("memory", Level.WARN, seen, cost, "end other programs, or set KELVIN_HOST_BYTES")
    return Finding("memory", Level.OK, seen, tier)


def judge_swap(swap_bytes: int) -> Finding:
    """Judge the size of all swap areas together."""
    if not swap_bytes:
        return Finding("swap", Level.OK, "none")
    cost = "weights in memory may be swapped out: a warm start reads the disk, and a secret may lie on it"
    return Finding("swap", Level.NOTE, as_bytes(swap_bytes), cost, "swapoff -a, or memory.swap.max=0 for the service")


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
