"""Check the kernel: release, io_uring, randomness, clock. Files that are not there say nothing."""

import contextlib
import ctypes
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kelvin.policy.findings import Finding, Level

CGROUP: Final = Path("/sys/fs/cgroup")
_IO_URING_SETUP: Final = 425  # the same number on every architecture
_TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised
_CLOCK: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_ENTROPY: Final = Path("/proc/sys/kernel/random/entropy_avail")
_SET_CLOCK: Final = "chronyd or systemd-timesyncd"


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
    for directory in (CGROUP / own, CGROUP):
        text = try_text(directory / name)
        if text:
            return int(text) if text.isdigit() else None
    return None


def check_kernel() -> Iterator[Finding]:
    """io_uring is asked for a ring of one entry, which is closed again."""
    text = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", text)
    yield judge_release((int(numbers[1]), int(numbers[2])) if numbers else (0, 0), text)
    fault = _io_uring_fault()
    ring = "allowed" if not fault else f"refused: {fault}"
    yield Finding("io_uring", Level.NOTE, ring, "none: this version reads with threads")
    entropy = try_text(_ENTROPY)
    yield from judge_randomness(int(entropy) if entropy.isdigit() else None)


def _io_uring_fault() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params, all zero
    fd = libc.syscall(_IO_URING_SETUP, 1, parameters)
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    os.close(fd)
    return ""


def judge_release(release: tuple[int, int], text: str) -> Finding:
    """Release as (6, 1), and in full."""
    if release < (5, 3):
        cost = "no pidfd_open: standbys can't be forked"
        return Finding("kernel", Level.FAIL, text, cost, "Linux 6.1 or later")
    if release < (6, 1):
        return Finding("kernel", Level.WARN, text, "no MADV_COLLAPSE: see huge pages", "Linux 6.1 or later")
    return Finding("kernel", Level.OK, text)


def judge_randomness(entropy_bits: int | None) -> Iterator[Finding]:
    """Nothing where there is enough, or the kernel does not say."""
    if entropy_bits is not None and entropy_bits < 128:
        cost = "making keys and TLS handshakes wait for randomness"
        yield Finding("randomness", Level.WARN, f"{entropy_bits} bits", cost, "virtio-rng, or rngd")


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


def check_clock(before_s: float, data: Path) -> Iterator[Finding]:
    """Synchronisation, steps, source. `before_s` is `wall_minus_monotonic_s` of a while ago."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    source = try_text(_CLOCK)
    yield judge_synchronisation(timex.maxerror / 1e6 if 0 <= state < _TIME_ERROR else None, source)
    yield from judge_steps(wall_minus_monotonic_s() - before_s, max(_written_at_s(data), default=0.0) - time.time())
    yield from judge_source(source)


def _written_at_s(data: Path) -> Iterator[float]:
    """Of files that a running installation writes again and again; any may go meanwhile."""
    for pattern in ("*", "logs/*", "spool/*"):
        for path in data.glob(pattern):
            with contextlib.suppress(OSError):
                yield path.stat().st_mtime


def judge_synchronisation(error_s: float | None, source: str) -> Finding:
    """`error_s` is the kernel's bound on the clock's error; None where it is not synchronised."""
    if error_s is not None:
        return Finding("clock", Level.OK, f"synchronised, within {error_s:.3f} s; {source}")
    cost = "keys expire, and requests fall into months, by a clock that nobody sets"
    return Finding("clock", Level.WARN, f"not synchronised, says the kernel; {source}", cost, _SET_CLOCK)


def judge_steps(stepped_s: float, ahead_s: float) -> Iterator[Finding]:
    """`stepped_s` is how far the wall clock moved against the monotonic one while doctor ran; `ahead_s` how far the
    newest file of the data directory lies in the future.
    """
    if abs(stepped_s) > 0.05:
        cost = "durations go by the monotonic clock; the times of records and the expiry of keys jumped"
        yield Finding("clock step", Level.WARN, f"{stepped_s:+.3f} s while doctor ran", cost, _SET_CLOCK)
    if ahead_s > 5:
        cost = "the clock went back: records overlap, and what is older than a grace period is kept for longer"
        seen = f"the newest file of the data directory is {ahead_s:.0f} s in the future"
        yield Finding("clock went back", Level.WARN, seen, cost, _SET_CLOCK)


def judge_source(source: str) -> Iterator[Finding]:
    """Nothing where reading the time is cheap."""
    if source not in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen", ""):
        cost = "reading the time is a system call: some microseconds more for each token"
        yield Finding("clock source", Level.NOTE, source, cost, "clocksource=tsc, where it is stable")
