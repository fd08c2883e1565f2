"""The state of the machine that a measurement stands on: what it is, and what of a file the page cache holds."""

import contextlib
import ctypes
import mmap
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 5.0
_PAGE: Final = os.sysconf("SC_PAGESIZE")


class CacheNotAsAsked(Exception):
    """The page cache could not be brought into the state that a row needs."""


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Make the guest forget these files, and check it. A hypervisor may still hold them: said in the report."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # dirty pages cannot be dropped
            limit = time.monotonic() + PATIENCE_S
            while (held := _forget(fd)) > 0:  # a process that is about to unmap it still holds pages
                if time.monotonic() > limit:
                    raise CacheNotAsAsked(f"{path.name}: {held} pages are still in the page cache")
                time.sleep(0.02)
        finally:
            os.close(fd)


def _forget(fd: int) -> int:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return _resident_pages(fd)


def warm_page_cache(paths: Iterable[Path]) -> None:
    """Make the guest hold every page of these files, and check it once all were read: others may drop what is held."""
    missing = dict.fromkeys(paths, 1)
    limit = time.monotonic() + PATIENCE_S
    while True:
        for path in missing:
            _read_whole(path)
        missing = {path: count for path in missing if (count := _missing_pages(path))}
        if not missing:
            return
        if time.monotonic() > limit:
            path, count = next(iter(missing.items()))
            raise CacheNotAsAsked(f"{path.name}: {count} pages are not in the page cache")


def _read_whole(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(8 << 20)
        while file.readinto(buffer):
            pass


def _missing_pages(path: Path) -> int:
    with path.open("rb", buffering=0) as file:
        return -(-os.fstat(file.fileno()).st_size // _PAGE) - _resident_pages(file.fileno())


def _resident_pages(fd: int) -> int:
    """Pages of the file in the page cache, by mincore(2)."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = -(-size // _PAGE)
    seen = ctypes.create_string_buffer(pages)
    # A private writable mapping only because ctypes takes no address of a read-only one; nothing is written.
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        anchor = ctypes.c_char.from_buffer(view)
        status = libc.mincore(ctypes.addressof(anchor), size, seen)
        del anchor
    if status != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in seen.raw)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_kb * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpu": None,
    }


def load_1m() -> float:
    """How many processes ran or waited for a core or a disk, over the last minute: how busy others keep the machine."""
    return os.getloadavg()[0]


def free_memory_bytes() -> int:
    """What could be had without driving anybody out (MemAvailable)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def commit() -> str | None:
    """The commit of the source tree, with `+` where it was changed; None outside a checkout."""
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None


def processes() -> Iterator[tuple[list[str], int]]:
    """This process's descendants: words of the command line, and the peak of resident memory in bytes (VmHWM)."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := _status(int(entry))):
            parents[int(entry)] = int(status["PPid"])
    for pid in parents:
        if _descends(pid, parents):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                yield words, int(_status(pid).get("VmHWM", "0 kB").split()[0]) * 1024


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid := parents.get(pid, 0):
        if pid == os.getpid():
            return True
    return False


def _status(pid: int) -> dict[str, str]:
    """Of proc(5); nothing where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
