"""Judge a machine: disk, memory, kernel, limits, clock, devices. Pure: facts in, findings out.

Costs are in a caller's terms. Thresholds are where a cost becomes visible beside the figures of `docs/measurements`.
"""

from dataclasses import dataclass
from typing import Final

from contracts.gpu import Degraded, GpuFacts, Healthy, Unhealthy, judge
from kelvin.policy.findings import Finding, Level, as_bytes

MODEL_BYTES: Final = 8_000_000_000  # what costs are told of
GB: Final = 1_000_000_000
READ_ROOM_BYTES: Final = 64 << 20  # with less room, a file to measure reading would take it from requests
FILES_PER_REQUEST: Final = 2  # a caller's socket and a replica's
FILES_BESIDE: Final = 512
_FAST: Final = 1.0 * GB
_SLOW: Final = 0.2 * GB


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Of the data directory's disk. Rates are None where O_DIRECT is refused."""

    read_bytes_s: float | None
    read_bytes: int  # that were read
    sync_p50_s: float
    sync_max_s: float
    syncs: int
    free_bytes: int
    total_bytes: int
    free_inodes: int | None  # None where the file system counts none
    fault: str | None = None  # why it could not be measured: full, read-only, …


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """`collapsed` is whether shared memory was brought into a huge page; else `collapse_fault` says why not."""

    collapsed: bool
    collapse_fault: str
    shmem_enabled: str
    thp_enabled: str
    total_bytes: int
    available_bytes: int
    swap_bytes: int
    cgroup_bytes: int | None


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Hard limits; None is unlimited."""

    nofile: int | None
    nproc: int | None
    memlock: int | None
    cores: int
    cgroup_cores: float | None
    cgroup_pids: int | None


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Release as (6, 1); `io_uring` is "" where the call is allowed, else why not."""

    release: tuple[int, int]
    text: str
    io_uring: str
    entropy_bits: int | None


@dataclass(frozen=True, slots=True)
class ClockFacts:
    """`stepped_s` is how far the wall clock moved against the monotonic one while doctor ran; `ahead_s` how far the
    newest file of the data directory lies in the future."""

    synchronised: bool
    error_s: float | None  # the kernel's bound on it
    source: str
    stepped_s: float
    ahead_s: float


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`nvidia` is the driver's version; empty where there is none. `criu` is what its check said."""

    nvidia: str
    torch: str
    criu: str | None
    criu_works: bool
    gpus: tuple[GpuFacts, ...] = ()  # those that can be asked


def judge_disk(facts: DiskFacts) -> list[Finding]:
    """Read rate, sync, room. On an almost full disk the read rate was not measured, and is left out."""
    if facts.fault is not None:
        cost = "requests are refused (503), as their records can't be made durable; pushes, too (507)"
        mend = "make room, or mount it writable; then run doctor again"
        return [Finding("disk", Level.FAIL, facts.fault, cost, mend), _space(facts)]
    if facts.free_bytes < READ_ROOM_BYTES:
        return [_sync(facts), _space(facts)]
    return [_read(facts), _sync(facts), _space(facts)]


def _read(facts: DiskFacts) -> Finding:
    check = "disk read"
    if facts.read_bytes_s is None:
        cost = "cold starts read through the page cache: one more copy of every byte"
        return Finding(check, Level.WARN, "O_DIRECT is refused", cost, "put the data directory on ext4 or XFS on NVMe")
    rate = facts.read_bytes_s
    seen = f"{rate / GB:.2f} GB/s, O_DIRECT, {as_bytes(facts.read_bytes)} read"
    cost = f"a cold start of a model of {as_bytes(MODEL_BYTES)} from this disk takes {MODEL_BYTES / rate:.0f} s or more"
    if rate >= _FAST:
        return Finding(check, Level.OK, seen, cost)
    level = Level.NOTE if rate >= _SLOW else Level.WARN
    return Finding(
        check, level, seen, cost, "a faster disk: --data on local NVMe; or a host tier that holds the models"
    )


def _sync(facts: DiskFacts) -> Finding:
    p50_ms, max_ms = facts.sync_p50_s * 1e3, facts.sync_max_s * 1e3
    seen = f"{p50_ms:.2f} ms median, {max_ms:.1f} ms at most, of {facts.syncs} fdatasync"
    cost = f"the last byte of each answer waits for one: {p50_ms:.2f} ms"
    if p50_ms < 2:
        return Finding("disk sync", Level.OK, seen, cost)
    level = Level.NOTE if p50_ms < 10 else Level.WARN
    return Finding("disk sync", level, seen, cost, "a disk with a write cache that survives power loss")


def _space(facts: DiskFacts) -> Finding:
    seen = f"{as_bytes(facts.free_bytes)} of {as_bytes(facts.total_bytes)} free"
    mend = (
        "`kelvin up` with a smaller KELVIN_NVME_BYTES frees the cache's room at once; `kelvin versions delete` and, "
        "after the grace period, `kelvin collect --run`; or a larger disk"
    )
    if facts.free_inodes is not None and facts.free_inodes < 1000:
        cost = "no file can be made soon: requests 503, pushes 507"
        return Finding("disk space", Level.FAIL, f"{seen}, {facts.free_inodes} inodes", cost, mend)
    if facts.free_bytes < GB:
        return Finding("disk space", Level.FAIL, seen, "pushes are refused (507) soon, then requests (503)", mend)
    if facts.free_bytes < 10 * GB or facts.free_bytes * 20 < facts.total_bytes:
        return Finding("disk space", Level.WARN, seen, "few versions fit; the NVMe tier evicts early", mend)
    return Finding("disk space", Level.OK, seen)


def judge_memory(facts: MemoryFacts) -> list[Finding]:
    """Huge pages, size, swap."""
    modes = f"shmem_enabled {facts.shmem_enabled}, THP {facts.thp_enabled}"
    if facts.collapsed:
        huge = Finding("huge pages", Level.OK, f"MADV_COLLAPSE of shared memory works; {modes}")
    else:
        cost = "the host tier is filled 3 to 4 times slower, and a replica's first touch of 0.5 GB takes 54 ms, not 9"
        mend = "Linux 6.1 or later; echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; free memory"
        huge = Finding("huge pages", Level.WARN, f"refused: {facts.collapse_fault}; {modes}", cost, mend)
    bound = min(facts.total_bytes, facts.cgroup_bytes or facts.total_bytes)
    seen = f"{as_bytes(facts.available_bytes)} of {as_bytes(facts.total_bytes)} available"
    if facts.cgroup_bytes is not None:
        seen += f", control group {as_bytes(facts.cgroup_bytes)}"
    tier = f"the host tier is {as_bytes(bound / 4)} unless KELVIN_HOST_BYTES says otherwise"
    if bound < 2 * GB:
        size = Finding(
            "memory", Level.FAIL, seen, "services and zygote alone take 0.5 GB: no model fits", "more memory"
        )
    elif facts.available_bytes * 4 < bound:
        cost = f"{tier}, more than is available: starts wait for memory"
        size = Finding("memory", Level.WARN, seen, cost, "end other programs, or set KELVIN_HOST_BYTES")
    else:
        size = Finding("memory", Level.OK, seen, tier)
    return [huge, size, _swap(facts.swap_bytes)]


def _swap(swap_bytes: int) -> Finding:
    if not swap_bytes:
        return Finding("swap", Level.OK, "none")
    cost = "weights in memory may be swapped out: a warm start reads the disk, and a secret may lie on it"
    return Finding("swap", Level.NOTE, as_bytes(swap_bytes), cost, "swapoff -a, or memory.swap.max=0 for the service")


def judge_limits(facts: LimitFacts, connections: int) -> list[Finding]:
    """`connections` is KELVIN_CONNECTIONS."""
    wanted = connections * FILES_PER_REQUEST + FILES_BESIDE
    return [_nofile(facts.nofile, wanted), _nproc(facts), _memlock(facts.memlock), _cores(facts)]


def _nofile(hard: int | None, wanted: int) -> Finding:
    check, mend = "limit nofile", f"LimitNOFILE={max(wanted, 65536)} in the unit, or ulimit -Hn {max(wanted, 65536)}"
    if hard is None or hard >= wanted:
        return Finding(check, Level.OK, f"hard limit {'none' if hard is None else hard}")
    served = max(0, (hard - FILES_BESIDE) // FILES_PER_REQUEST)
    cost = f"about {served} callers at once are served, the rest is refused"
    return Finding(check, Level.FAIL if hard < FILES_BESIDE else Level.WARN, f"hard limit {hard}", cost, mend)


def _nproc(facts: LimitFacts) -> Finding:
    named = [("nproc", facts.nproc), ("pids.max", facts.cgroup_pids)]
    limits = [(name, limit) for name, limit in named if limit is not None]
    seen = ", ".join(f"{name} {limit}" for name, limit in limits) or "no limit"
    least = min((limit for _, limit in limits), default=None)
    if least is None or least >= 512:
        return Finding("limit nproc", Level.OK, seen)
    cost = "a replica has a dozen threads: standbys can't be forked, starts are refused"
    return Finding(
        "limit nproc", Level.FAIL if least < 64 else Level.WARN, seen, cost, "TasksMax=4096, ulimit -Hu 4096"
    )


def _memlock(limit: int | None) -> Finding:
    seen = "none" if limit is None else as_bytes(limit)
    if limit is None or limit >= GB:
        return Finding("limit memlock", Level.OK, seen)
    cost = "nothing here: memory is locked only for copies to a GPU"
    return Finding("limit memlock", Level.NOTE, seen, cost, "LimitMEMLOCK=infinity, on a machine with a GPU")


def _cores(facts: LimitFacts) -> Finding:
    quota = facts.cgroup_cores
    seen = f"{facts.cores} cores" + ("" if quota is None else f", quota {quota:g}")
    if quota is not None and quota < facts.cores:
        cost = "replicas are stopped for milliseconds when the quota is used up: uneven tokens"
        return Finding("processor", Level.WARN, seen, cost, "CPUQuota= empty, or cpusets instead of a quota")
    if facts.cores < 2:
        return Finding(
            "processor", Level.WARN, seen, "services and replicas take turns: slow starts", "2 cores or more"
        )
    return Finding("processor", Level.OK, seen)


def judge_kernel(facts: KernelFacts) -> list[Finding]:
    """Release, io_uring, randomness."""
    if facts.release < (5, 3):
        release = Finding(
            "kernel", Level.FAIL, facts.text, "no pidfd_open: standbys can't be forked", "Linux 6.1 or later"
        )
    elif facts.release < (6, 1):
        cost = "no MADV_COLLAPSE: see huge pages"
        release = Finding("kernel", Level.WARN, facts.text, cost, "Linux 6.1 or later")
    else:
        release = Finding("kernel", Level.OK, facts.text)
    ring = "allowed" if not facts.io_uring else f"refused: {facts.io_uring}"
    findings = [release, Finding("io_uring", Level.NOTE, ring, "none: this version reads with threads")]
    if facts.entropy_bits is not None and facts.entropy_bits < 128:
        cost = "making keys and TLS handshakes wait for randomness"
        findings.append(Finding("randomness", Level.WARN, f"{facts.entropy_bits} bits", cost, "virtio-rng, or rngd"))
    return findings


def judge_clock(facts: ClockFacts) -> list[Finding]:
    """Synchronisation, steps, source."""
    bound = "" if facts.error_s is None else f", within {facts.error_s:.3f} s"
    mend = "chronyd or systemd-timesyncd"
    if facts.synchronised:
        sync = Finding("clock", Level.OK, f"synchronised{bound}; {facts.source}")
    else:
        cost = "keys expire, and requests fall into months, by a clock that nobody sets"
        sync = Finding("clock", Level.WARN, f"not synchronised, says the kernel; {facts.source}", cost, mend)
    findings = [sync]
    if abs(facts.stepped_s) > 0.05:
        cost = "durations go by the monotonic clock; the times of records and the expiry of keys jumped"
        findings.append(Finding("clock step", Level.WARN, f"{facts.stepped_s:+.3f} s while doctor ran", cost, mend))
    if facts.ahead_s > 5:
        cost = "the clock went back: records overlap, and what is older than a grace period is kept for longer"
        seen = f"the newest file of the data directory is {facts.ahead_s:.0f} s in the future"
        findings.append(Finding("clock went back", Level.WARN, seen, cost, mend))
    if facts.source not in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen", ""):
        cost = "reading the time is a system call: some microseconds more for each token"
        findings.append(Finding("clock source", Level.NOTE, facts.source, cost, "clocksource=tsc, where it is stable"))
    return findings


def judge_devices(facts: DeviceFacts) -> list[Finding]:
    """What there is beside the processor. This version needs none of it."""
    torch = f"torch {facts.torch}" if facts.torch else "torch is not installed"
    if facts.nvidia:
        cost = "models compute on the processor: the path to a GPU was never run"
        gpu = Finding("GPU", Level.NOTE, f"NVIDIA driver {facts.nvidia}; {torch}", cost)
    else:
        gpu = Finding("GPU", Level.NOTE, f"no NVIDIA driver; {torch}", "models compute on the processor")
    if not facts.torch:
        gpu = Finding("GPU", Level.FAIL, gpu.seen, "no model can run", "pip install 'kelvin-serving[runtime]'")
    seen = "not installed" if facts.criu is None else f"{'works' if facts.criu_works else 'refuses'}: {facts.criu}"
    return [
        gpu,
        *map(_judge_gpu, facts.gpus),
        Finding("CRIU", Level.NOTE, seen, "none: processes are forked, not restored"),
    ]


def _judge_gpu(facts: GpuFacts) -> Finding:
    """What a runtime in a pod would make of it."""
    check = f"{facts.name} health"
    match judge(facts):
        case Unhealthy(reason):
            return Finding(check, Level.FAIL, reason, "a runtime in a pod serves nothing on it", "reset or replace it")
        case Degraded(reason):
            return Finding(check, Level.WARN, reason, "none yet", "drain its node when it suits, and reset it")
        case Healthy():
            known = (f"{facts.temperature_c} C" if facts.temperature_c is not None else "", _memory_of(facts))
            return Finding(check, Level.OK, ", ".join(each for each in known if each) or "nothing is known against it")


def _memory_of(facts: GpuFacts) -> str:
    if facts.memory_used_bytes is None or facts.memory_total_bytes is None:
        return ""
    return f"{as_bytes(facts.memory_used_bytes)} of {as_bytes(facts.memory_total_bytes)} in use"
