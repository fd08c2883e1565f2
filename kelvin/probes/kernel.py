"""Look at the kernel: release, limits, control group, io_uring, clock. Files that are not there say nothing."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kelvin.policy.machine import ClockFacts, KernelFacts, LimitFacts

_IO_URING_SETUP: Final = 425  # the same number on every architecture
_TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised
_CGROUP: Final = Path("/sys/fs/cgroup")
_CLOCK: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_ENTROPY: Final = Path("/proc/sys/kernel/random/entropy_avail")


def try_text(path: Path) -> str:
    """Its text; empty where it can't be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def chosen(text: str) -> str:
    """The word in brackets of `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else text or "unknown"


def cgroup_number(name: str) -> int | None:
    """Of the control group that we are in, or of the root of its namespace; None for `max` and where there is none."""
    own = try_text(Path("/proc/self/cgroup")).rpartition("::")[2].lstrip("/")
    for directory in (_CGROUP / own, _CGROUP):
        text = try_text(directory / name)
        if text:
            return int(text) if text.isdigit() else None
    return None


def look_at_limits() -> LimitFacts:
    """Of this process, which `kelvin up` would start with."""
    return LimitFacts(
        nofile=_hard(resource.RLIMIT_NOFILE),
        nproc=_hard(resource.RLIMIT_NPROC),
        memlock=_hard(resource.RLIMIT_MEMLOCK),
        cores=len(os.sched_getaffinity(0)),
        cgroup_cores=_quota(),
        cgroup_pids=cgroup_number("pids.max"),
    )


def _hard(which: int) -> int | None:
    limit = resource.getrlimit(which)[1]
    return None if limit == resource.RLIM_INFINITY else limit


def _quota() -> float | None:
    """Cores that `cpu.max` gives."""
    own = try_text(Path("/proc/self/cgroup")).rpartition("::")[2].lstrip("/")
    words = (try_text(_CGROUP / own / "cpu.max") or try_text(_CGROUP / "cpu.max")).split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def look_at_kernel() -> KernelFacts:
    """io_uring is asked for a ring of one entry, which is closed again."""
    text = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", text)
    entropy = try_text(_ENTROPY)
    return KernelFacts(
        release=(int(numbers[1]), int(numbers[2])) if numbers else (0, 0),
        text=text,
        io_uring=_io_uring_fault(),
        entropy_bits=int(entropy) if entropy.isdigit() else None,
    )


def _io_uring_fault() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params, all zero
    fd = libc.syscall(_IO_URING_SETUP, 1, parameters)
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    os.close(fd)
    return ""


class _Timex(ctypes.Structure):
    """The beginning of struct timex (adjtimex(2)); what follows is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("rest", ctypes.c_char * 256),
    )


def wall_minus_monotonic_s() -> float:
    """Constant, but for steps and slewing of the wall clock."""
    return time.time() - time.monotonic()


def look_at_clock(before_s: float, data: Path) -> ClockFacts:
    """`before_s` is `wall_minus_monotonic_s` of a while ago."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    return ClockFacts(
        synchronised=0 <= state < _TIME_ERROR,
        error_s=timex.maxerror / 1e6 if 0 <= state < _TIME_ERROR else None,
        source=try_text(_CLOCK),
        stepped_s=wall_minus_monotonic_s() - before_s,
        ahead_s=max(_written_at_s(data), default=0.0) - time.time(),
    )


def _written_at_s(data: Path) -> Iterator[float]:
    """Of files that a running installation writes again and again; any may go meanwhile."""
    for pattern in ("*", "logs/*", "spool/*"):
        for path in data.glob(pattern):
            with contextlib.suppress(OSError):
                yield path.stat().st_mtime
