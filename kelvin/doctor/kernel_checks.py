"""Check the kernel and its limits: release, io_uring, randomness, clock, rlimits, memory, huge pages.

The limits are those that `kelvin up` would start with. A file that does not exist yields no finding.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kelvin.doctor.finding_policy import GB, Finding, FindingLevel, format_bytes

CGROUP: Final = Path("/sys/fs/cgroup")
_IO_URING_SETUP: Final = 425  # the same number on every architecture
_TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised
_CLOCK: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_ENTROPY: Final = Path("/proc/sys/kernel/random/entropy_avail")
_SET_CLOCK: Final = "chronyd or systemd-timesyncd"
FILES_PER_REQUEST: Final = 2  # a caller's socket and a replica's
RESERVED_FILES: Final = 512
_HUGE: Final = 2 << 20
_POPULATE_WRITE: Final = 23  # Linux 5.14
_COLLAPSE: Final = 25  # Linux 6.1
_FIXED: Final = 0x10  # MAP_FIXED
_FAILED: Final = ctypes.c_void_p(-1).value
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")


def try_read_text(path: Path) -> str:
    """Return the file's text without surrounding spaces, or "" if it can't be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def bracketed_word(text: str) -> str:
    """Return the word in brackets: `madvise` of `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else text or "unknown"


def cgroup_number(name: str) -> int | None:
    """Return a number of this process's control group, or of its namespace's root group. None: `max`, or no file."""
    text = _cgroup_text(name)
    return int(text) if text.isdigit() else None


def _cgroup_text(name: str) -> str:
    own_group = try_read_text(Path("/proc/self/cgroup")).rpartition("::")[2].lstrip("/")
    return try_read_text(CGROUP / own_group / name) or try_read_text(CGROUP / name)


def check_kernel() -> Iterator[Finding]:
    """Yield findings about release, io_uring and randomness. Opens and closes a ring of one entry to test io_uring."""
    text = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", text)
    yield judge_release((int(numbers[1]), int(numbers[2])) if numbers else (0, 0), text)
    fault = _io_uring_fault()
    ring = "allowed" if not fault else f"refused: {fault}"
    yield Finding("io_uring", FindingLevel.NOTE, ring, "none: this release reads with threads")
    entropy = try_read_text(_ENTROPY)
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
    """Judge the kernel release: `(6, 1)`, and the full text."""
    if release < (5, 3):
        cost = "no pidfd_open: standbys can't be forked"
        return Finding("kernel", FindingLevel.FAIL, text, cost, "Linux 6.1 or later")
    if release < (6, 1):
        return Finding("kernel", FindingLevel.WARN, text, "no MADV_COLLAPSE: see huge pages", "Linux 6.1 or later")
    return Finding("kernel", FindingLevel.OK, text)


def judge_randomness(entropy_bits: int | None) -> Iterator[Finding]:
    """Yield a warning if the kernel reports too little entropy."""
    if entropy_bits is not None and entropy_bits < 128:
        cost = "making keys and TLS handshakes wait for randomness"
        yield Finding("randomness", FindingLevel.WARN, f"{entropy_bits} bits", cost, "virtio-rng, or rngd")


class _Timex(ctypes.Structure):
    """The first fields of struct timex (adjtimex(2)), and room for the others."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("rest", ctypes.c_char * 256),
    )


def wall_minus_monotonic_s() -> float:
    """Return wall clock minus monotonic clock. It changes only if the wall clock steps or slews."""
    return time.time() - time.monotonic()


def check_clock(before_s: float, data: Path) -> Iterator[Finding]:
    """Yield findings about the clock. `before_s` is an earlier result of `wall_minus_monotonic_s`."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    source = try_read_text(_CLOCK)
    yield judge_synchronisation(timex.maxerror / 1e6 if 0 <= state < _TIME_ERROR else None, source)
    yield from judge_steps(wall_minus_monotonic_s() - before_s, max(_written_at_s(data), default=0.0) - time.time())
    yield from judge_source(source)


def _written_at_s(data: Path) -> Iterator[float]:
    """Yield modification times of files that a running installation writes often. A file may vanish meanwhile."""
    for pattern in ("*", "logs/*", "spool/*"):
        for path in data.glob(pattern):
            with contextlib.suppress(OSError):
                yield path.stat().st_mtime


def judge_synchronisation(error_s: float | None, source: str) -> Finding:
    """Judge the clock by the kernel's bound on its error, in seconds. None: the clock is not synchronised."""
    if error_s is not None:
        return Finding("clock", FindingLevel.OK, f"synchronised, within {error_s:.3f} s; {source}")
    cost = "expiry of keys and months of bills follow a clock that may be wrong"
    return Finding("clock", FindingLevel.WARN, f"not synchronised, says the kernel; {source}", cost, _SET_CLOCK)


def judge_steps(stepped_s: float, ahead_s: float) -> Iterator[Finding]:
    """Judge jumps of the wall clock. `stepped_s`: against the monotonic clock while doctor ran. `ahead_s`: how far the
    newest file of the data directory lies in the future.
    """
    if abs(stepped_s) > 0.05:
        cost = "durations go by the monotonic clock; the times of records and the expiry of keys jumped"
        yield Finding("clock step", FindingLevel.WARN, f"{stepped_s:+.3f} s while doctor ran", cost, _SET_CLOCK)
    if ahead_s > 5:
        cost = "the clock went back: records overlap, and what is older than a grace period is kept for longer"
        seen = f"the newest file of the data directory is {ahead_s:.0f} s in the future"
        yield Finding("clock went back", FindingLevel.WARN, seen, cost, _SET_CLOCK)


def judge_source(source: str) -> Iterator[Finding]:
    """Yield a note if reading the time is slow with this clock source."""
    if source not in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen", ""):
        cost = "reading the time is a system call: some microseconds more for each token"
        yield Finding("clock source", FindingLevel.NOTE, source, cost, "clocksource=tsc, where it is stable")


def check_limits(connections: int) -> Iterator[Finding]:
    """Yield findings about limits of this process and its control group. `connections` is KELVIN_CONNECTIONS."""
    yield judge_descriptors(_hard_limit(resource.RLIMIT_NOFILE), connections)
    yield judge_processes(_hard_limit(resource.RLIMIT_NPROC), cgroup_number("pids.max"))
    yield judge_locked_memory(_hard_limit(resource.RLIMIT_MEMLOCK))
    yield judge_cores(core_count(), _cpu_quota())


def core_count() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _hard_limit(resource_kind: int) -> int | None:
    """Return a hard limit of this process. None means unlimited, as in all functions below."""
    limit = resource.getrlimit(resource_kind)[1]
    return None if limit == resource.RLIM_INFINITY else limit


def _cpu_quota() -> float | None:
    """Return the control group's CPU quota in cores, or None."""
    words = _cgroup_text("cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def judge_descriptors(hard: int | None, connections: int) -> Finding:
    """Judge the limit on open files of one process. `connections` is how many callers may be connected."""
    needed = connections * FILES_PER_REQUEST + RESERVED_FILES
    check, mend = "limit nofile", f"LimitNOFILE={max(needed, 65536)} in the unit, or ulimit -Hn {max(needed, 65536)}"
    if hard is None or hard >= needed:
        return Finding(check, FindingLevel.OK, f"hard limit {'none' if hard is None else hard}")
    served = max(0, (hard - RESERVED_FILES) // FILES_PER_REQUEST)
    cost = f"about {served} callers at once are served, the rest is refused"
    return Finding(
        check, FindingLevel.FAIL if hard < RESERVED_FILES else FindingLevel.WARN, f"hard limit {hard}", cost, mend
    )


def judge_processes(user: int | None, cgroup: int | None) -> Finding:
    """Judge the limits on processes of the user and of the control group."""
    limits = [(name, limit) for name, limit in (("nproc", user), ("pids.max", cgroup)) if limit is not None]
    seen = ", ".join(f"{name} {limit}" for name, limit in limits) or "no limit"
    least = min((limit for _, limit in limits), default=None)
    if least is None or least >= 512:
        return Finding("limit nproc", FindingLevel.OK, seen)
    cost = "a replica has a dozen threads: standbys can't be forked, starts are refused"
    return Finding(
        "limit nproc",
        FindingLevel.FAIL if least < 64 else FindingLevel.WARN,
        seen,
        cost,
        "TasksMax=4096, ulimit -Hu 4096",
    )


def judge_locked_memory(limit_bytes: int | None) -> Finding:
    """Judge the limit on locked memory of one process. None means unlimited."""
    seen = "none" if limit_bytes is None else format_bytes(limit_bytes)
    if limit_bytes is None or limit_bytes >= GB:
        return Finding("limit memlock", FindingLevel.OK, seen)
    cost = "nothing here: memory is locked only for copies to a GPU"
    return Finding("limit memlock", FindingLevel.NOTE, seen, cost, "LimitMEMLOCK=infinity, on a machine with a GPU")


def judge_cores(cores: int, quota: float | None) -> Finding:
    """Judge the number of cores. `quota` is the CPU quota of the control group, in cores."""
    seen = f"{cores} cores" + ("" if quota is None else f", quota {quota:g}")
    if quota is not None and quota < cores:
        cost = "replicas are stopped for milliseconds when the quota is used up: uneven tokens"
        return Finding("processor", FindingLevel.WARN, seen, cost, "CPUQuota= empty, or cpusets instead of a quota")
    if cores < 2:
        return Finding(
            "processor", FindingLevel.WARN, seen, "services and replicas take turns: slow starts", "2 cores or more"
        )
    return Finding("processor", FindingLevel.OK, seen)


def check_memory() -> Iterator[Finding]:
    """Yield findings about huge pages, memory size and swap. Takes a few milliseconds."""
    shmem, private = (bracketed_word(try_read_text(_THP / name)) for name in ("shmem_enabled", "enabled"))
    modes = f"shmem_enabled {shmem}, THP {private}"
    yield judge_huge_pages(_collapse_fault(), modes)
    sizes = _sizes()
    available = sizes.get("MemAvailable", sizes["MemFree"])
    yield judge_size(sizes["MemTotal"], available, cgroup_number("memory.max"))
    yield judge_swap(sizes["SwapTotal"])


def usable_bytes() -> int:
    """Return the machine's memory, or the limit of the control group if that is lower."""
    return _usable_bytes(_sizes()["MemTotal"], cgroup_number("memory.max"))


def _usable_bytes(total_bytes: int, cgroup_bytes: int | None) -> int:
    return min(total_bytes, cgroup_bytes or total_bytes)


def _sizes() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def judge_huge_pages(fault: str, modes: str) -> Finding:
    """Judge huge pages for shared memory. `fault` is why the kernel refused one, or "" if it gave one."""
    if not fault:
        return Finding("huge pages", FindingLevel.OK, f"MADV_COLLAPSE of shared memory works; {modes}")
    cost = "the host tier is filled 3 to 4 times slower, and a replica's first touch of 0.5 GB takes 54 ms, not 9"
    mend = "Linux 6.1 or later; echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; free memory"
    return Finding("huge pages", FindingLevel.WARN, f"refused: {fault}; {modes}", cost, mend)


def judge_size(total_bytes: int, available_bytes: int, cgroup_bytes: int | None) -> Finding:
    """Judge the memory size. `cgroup_bytes` is None if the control group has no limit."""
    bound = _usable_bytes(total_bytes, cgroup_bytes)
    seen = f"{format_bytes(available_bytes)} of {format_bytes(total_bytes)} available"
    if cgroup_bytes is not None:
        seen += f", control group {format_bytes(cgroup_bytes)}"
    tier = f"the host tier is {format_bytes(bound / 4)} unless KELVIN_HOST_BYTES says otherwise"
    if bound < 2 * GB:
        cost = "services and zygote alone take 0.5 GB: no model fits"
        return Finding("memory", FindingLevel.FAIL, seen, cost, "more memory")
    if available_bytes * 4 < bound:
        cost = f"{tier}, more than is available: starts wait for memory"
        return Finding("memory", FindingLevel.WARN, seen, cost, "end other programs, or set KELVIN_HOST_BYTES")
    return Finding("memory", FindingLevel.OK, seen, tier)


def judge_swap(swap_bytes: int) -> Finding:
    """Judge the total size of all swap areas."""
    if not swap_bytes:
        return Finding("swap", FindingLevel.OK, "none")
    cost = "weights in memory may be swapped out: a warm start reads the disk, and secrets may be written to it"
    return Finding(
        "swap", FindingLevel.NOTE, format_bytes(swap_bytes), cost, "swapoff -a, or memory.swap.max=0 for the service"
    )


def _collapse_fault() -> str:
    """Return why the kernel refused a huge page of shared memory, or "" if it gave one. Address and file offset must
    both be on a huge-page boundary, so a larger range is reserved first.
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
