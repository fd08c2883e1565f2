"""Read facts about processes from the kernel."""

import os
import select
import time
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_CLOCK_READINGS: Final = 5


def start_time_ns(pid: int) -> int:
    """Return when the process was forked, by CLOCK_MONOTONIC, to the kernel's tick (10 ms). Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    started_ns = int(fields[19]) * 10**9 // _TICKS_PER_S  # field 22, starttime, counted from field 3; CLOCK_BOOTTIME
    return started_ns - _suspended_ns()


def is_orphaned(lifeline_fd: int | None) -> bool:
    """Return whether the supervisor has ended. It holds the other end of this pipe, and never writes to it."""
    if lifeline_fd is None:
        return False
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    return bool(poll.poll(0))


def boot_id() -> str:
    """Return the kernel's id of this boot; "" if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def private_bytes(pid: int) -> int:
    """Return the process's resident memory without mapped files. 0 if the process is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (resident - shared) * _PAGE


def resident_bytes() -> int:
    """Return this process's resident memory. Raises OSError."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


def _suspended_ns() -> int:
    """Return how far CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC. A pause between the two readings makes the result too
    large, so take the least of several.
    """
    return min(-time.monotonic_ns() + time.clock_gettime_ns(time.CLOCK_BOOTTIME) for _ in range(_CLOCK_READINGS))
