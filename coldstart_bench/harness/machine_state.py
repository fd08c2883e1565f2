"""The state of the machine that a measurement stands on: what it is, and what of a file the page cache holds."""

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
_LOWEST_BIT: Final = bytes(value & 1 for value in range(256))  # the others are reserved


class PageCacheNotReady(Exception):
    """The page cache could not be brought into the state that a row needs."""


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Make the guest forget these files, and check it. A hypervisor may still hold them: said in the report."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # dirty pages cannot be dropped
            # A process that is about to unmap it still holds pages.
            if held := remaining(partial(_forget, fd), PATIENCE_S):
                raise PageCacheNotReady(f"{path.name}: {held} pages are still in the page cache")
        finally:
            os.close(fd)


def _forget(fd: int) -> int:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return _residency(fd).count(1)


def warm_page_cache(paths: Iterable[Path]) -> None:
    """Make the guest hold these files, and check it once all were read: others may drop what is held. All but a page in
    `PAGES_PER_MISSING_PAGE` counts as all: there are kernels that take a few back while one looks, or a few in a
    hundred. What is missing is read again, so often at the most.
    """
    files = list(paths)
    for path in files:
        _read(path, only_missing=False)

    def again() -> None:
        for path in files:
            _read(path, only_missing=True)

    retry_until_ok(again, lambda: _not_held(files), READINGS)


def retry_until_ok(again: Callable[[], None], problem: Callable[[], str | None], times: int) -> None:
    """Do it `again` until there is no `problem`, `times` times at most. Raises PageCacheNotReady with the last one."""
    for _ in range(times):
        if problem() is None:
            return
        again()
    if (what := problem()) is not None:
        raise PageCacheNotReady(f"{what}, after {times} attempts")


def _not_held(files: Iterable[Path]) -> str | None:
    """The first of which more is missing than is tolerated."""
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
    """Of each page of the file whether the page cache has it, by mincore(2): 1 or 0."""
    size = os.fstat(fd).st_size
    if size == 0:
        return b""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    seen = ctypes.create_string_buffer(-(-size // _PAGE))
    # A private writable mapping only because ctypes takes no address of a read-only one; nothing is written.
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        anchor = ctypes.c_char.from_buffer(view)
        status = libc.mincore(ctypes.addressof(anchor), size, seen)
        del anchor
    if status != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return seen.raw.translate(_LOWEST_BIT)


def describe_machine() -> dict[str, object]:
    """What the figures were measured on."""
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
    """Their models, as NVIDIA's driver has them."""
    lines = [line for place in sorted(drivers.glob("*/information")) for line in place.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def load_1m() -> float:
    """How many processes ran or waited for a core or a disk, over the last minute: how busy others keep the machine."""
    return os.getloadavg()[0]


def free_memory_bytes() -> int:
    """What could be had without driving anybody out (MemAvailable)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def source_commit() -> str | None:
    """The commit of the source tree, with `+` where it was changed; None outside a checkout, or without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
