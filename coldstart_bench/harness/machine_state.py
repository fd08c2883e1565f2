"""Describe the machine of a measurement, and control which files are in the page cache."""

import ctypes
import mmap
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from coldstart_bench.harness.polling import remaining

PATIENCE_S: Final = 5.0
GIT_S: Final = 30.0
PAGES_PER_MISSING_PAGE: Final = 1000
READINGS: Final = 20
_BLOCK: Final = 8 << 20
_PAGE: Final = os.sysconf("SC_PAGESIZE")
_LOWEST_BIT: Final = bytes(value & 1 for value in range(256))  # mincore(2): the other bits are reserved


class PageCacheNotReady(Exception):
    """The page cache can't be brought into the state that a measurement needs."""


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Drop these files from the guest's page cache, and check it. A hypervisor may still cache them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # dirty pages cannot be dropped
            # An ending process may still map the file, which keeps its pages.
            if held := remaining(partial(_forget, fd), PATIENCE_S):
                raise PageCacheNotReady(f"{path.name}: {held} pages are still in the page cache")
        finally:
            os.close(fd)


def _forget(fd: int) -> int:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return _residency(fd).count(1)


def warm_page_cache(paths: Iterable[Path]) -> None:
    """Read these files into the page cache, and check that they all stay there.

    One missing page in `PAGES_PER_MISSING_PAGE` is tolerated: some kernels reclaim a few pages meanwhile. Missing pages
    are read again, at most READINGS times.
    """
    files = list(paths)
    for path in files:
        _read(path, only_missing=False)

    def again() -> None:
        for path in files:
            _read(path, only_missing=True)

    retry_until_ok(again, lambda: _not_held(files), READINGS)


def retry_until_ok(again: Callable[[], None], problem: Callable[[], str | None], times: int) -> None:
    """Call `again` until there is no `problem`, at most `times` times. Raises PageCacheNotReady with the last one."""
    for _ in range(times):
        if problem() is None:
            return
        again()
    if (what := problem()) is not None:
        raise PageCacheNotReady(f"{what}, after {times} attempts")


def _not_held(files: Iterable[Path]) -> str | None:
    """Return a text about the first file that misses more pages than tolerated, or None."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            missing = _residency(file.fileno()).count(0)
        if missing * _PAGE * PAGES_PER_MISSING_PAGE > path.stat().st_size:
            return f"{path.name}: {missing} pages are not in the page cache"
    return None


def _read(path: Path, *, only_missing: bool) -> None:
    with path.open("rb", buffering=0) as file:
        seen = _residency(file.fileno()) if only_missing else b""
        buffer = bytearray(_BLOCK)
        for at in range(0, os.fstat(file.fileno()).st_size, _BLOCK):
            if not only_missing or 0 in seen[at // _PAGE : (at + _BLOCK) // _PAGE]:
                os.preadv(file.fileno(), [buffer], at)


def _residency(fd: int) -> bytes:
    """Return a byte per page of the file: 1 if the page cache has it, else 0 (mincore(2))."""
    size = os.fstat(fd).st_size
    if size == 0:
        return b""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    seen = ctypes.create_string_buffer(-(-size // _PAGE))
    # Private and writable, because ctypes can't take the address of a read-only mapping. Nothing is written.
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        anchor = ctypes.c_char.from_buffer(view)
        status = libc.mincore(ctypes.addressof(anchor), size, seen)
        del anchor
    if status != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return seen.raw.translate(_LOWEST_BIT)


def describe_machine() -> dict[str, object]:
    """Return the machine's CPU, memory, kernel, Python and GPUs for a report."""
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_kb * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpu": ", ".join(gpus()) or None,
    }


def gpus(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the models of the GPUs, from NVIDIA's driver."""
    lines = [line for place in sorted(drivers.glob("*/information")) for line in place.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def load_1m() -> float:
    """Return the load average of the last minute: processes that ran or waited for a core or a disk."""
    return os.getloadavg()[0]


def free_memory_bytes() -> int:
    """Return the memory available without swapping (MemAvailable)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def source_commit() -> str | None:
    """Return the commit of the source tree, with `+` if it was changed. None outside a checkout, or without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
