"""What a machine's figures come to: how bad, what it costs a caller, and what mends it."""

from dataclasses import replace

import pytest

from contracts.gpu import GpuFacts
from kelvin.policy.findings import Finding, Level, as_bytes, fails
from kelvin.policy.machine import (
    GB,
    ClockFacts,
    DeviceFacts,
    DiskFacts,
    KernelFacts,
    LimitFacts,
    MemoryFacts,
    judge_clock,
    judge_devices,
    judge_disk,
    judge_kernel,
    judge_limits,
    judge_memory,
)

DISK = DiskFacts(3.4 * GB, 128 << 20, 0.0002, 0.004, 50, 500 * GB, 1000 * GB, 10**6)
MEMORY = MemoryFacts(True, "", "never", "madvise", 24 * GB, 20 * GB, 0, None)
LIMITS = LimitFacts(65536, None, None, 2, None, None)
KERNEL = KernelFacts((6, 18), "6.18.4", "", 256)
CLOCK = ClockFacts(True, 0.001, "tsc", 0.0, -10.0)
DEVICES = DeviceFacts("", "2.13.0+cpu", None, False)
CONNECTIONS = 8192


def one(findings: list[Finding], check: str) -> Finding:
    """The finding of that name. Whatever is worse than a note has a cost and a mend."""
    for finding in findings:
        if finding.level in (Level.WARN, Level.FAIL):
            assert finding.cost, finding
            assert finding.mend, finding
    (found,) = [finding for finding in findings if finding.check == check]
    return found


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        pytest.param({}, "disk read", Level.OK, "3.40 GB/s", id="a fast disk"),
        pytest.param({"read_bytes_s": 0.9 * GB}, "disk read", Level.NOTE, "0.90 GB/s", id="a slower one"),
        pytest.param({"read_bytes_s": 0.1 * GB}, "disk read", Level.WARN, "0.10 GB/s", id="a slow one"),
        pytest.param({"read_bytes_s": None}, "disk read", Level.WARN, "O_DIRECT is refused", id="no O_DIRECT"),
        pytest.param({"sync_p50_s": 0.004}, "disk sync", Level.NOTE, "4.00 ms", id="a sync of 4 ms"),
        pytest.param({"sync_p50_s": 0.03}, "disk sync", Level.WARN, "30.00 ms", id="a sync of 30 ms"),
        pytest.param({"free_bytes": 5 * GB}, "disk space", Level.WARN, "5 GB of 1 TB", id="little room"),
        pytest.param({"free_bytes": 10**8}, "disk space", Level.FAIL, "100 MB of 1 TB", id="no room"),
        pytest.param({"free_inodes": 3}, "disk space", Level.FAIL, "3 inodes", id="no inodes"),
        pytest.param({"free_inodes": None}, "disk space", Level.OK, "500 GB", id="a file system without inodes"),
        pytest.param({"fault": "it is full"}, "disk", Level.FAIL, "it is full", id="a disk that refuses"),
    ],
)
def test_disk(changed: dict[str, object], check: str, level: Level, says: str) -> None:
    """Level and words."""
    found = one(judge_disk(replace(DISK, **changed)), check)  # type: ignore[arg-type]
    assert (found.level, says in found.seen) == (level, True), found


def test_read_rate_of_an_almost_full_disk_is_not_judged() -> None:
    """It was not measured. What is missing is room, and the disk is not said to refuse anything."""
    almost_full = replace(DISK, free_bytes=4 << 20, read_bytes_s=None, read_bytes=0)
    assert [finding.check for finding in judge_disk(almost_full)] == ["disk sync", "disk space"]


def test_a_slow_disk_is_told_in_seconds_of_a_cold_start() -> None:
    """8 GB at 0.9 GB/s."""
    assert "8 GB from this disk takes 9 s" in one(judge_disk(replace(DISK, read_bytes_s=0.9 * GB)), "disk read").cost


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        pytest.param({}, "huge pages", Level.OK, "MADV_COLLAPSE of shared memory works", id="huge pages"),
        pytest.param({"collapsed": False, "collapse_fault": "no"}, "huge pages", Level.WARN, "refused: no", id="none"),
        pytest.param({}, "memory", Level.OK, "20 GB of 24 GB", id="memory"),
        pytest.param({"cgroup_bytes": GB}, "memory", Level.FAIL, "control group 1 GB", id="a tight control group"),
        pytest.param({"available_bytes": GB}, "memory", Level.WARN, "1 GB of 24 GB", id="memory that others have"),
        pytest.param({}, "swap", Level.OK, "none", id="no swap"),
        pytest.param({"swap_bytes": GB}, "swap", Level.NOTE, "1 GB", id="swap"),
    ],
)
def test_memory(changed: dict[str, object], check: str, level: Level, says: str) -> None:
    """Level and words."""
    found = one(judge_memory(replace(MEMORY, **changed)), check)  # type: ignore[arg-type]
    assert (found.level, says in found.seen) == (level, True), found


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        pytest.param({}, "limit nofile", Level.OK, "65536", id="many descriptors"),
        pytest.param({"nofile": None}, "limit nofile", Level.OK, "none", id="no limit"),
        pytest.param({"nofile": 4096}, "limit nofile", Level.WARN, "4096", id="few descriptors"),
        pytest.param({"nofile": 256}, "limit nofile", Level.FAIL, "256", id="too few to serve anybody"),
        pytest.param({}, "limit nproc", Level.OK, "no limit", id="no limit of processes"),
        pytest.param({"nproc": 200}, "limit nproc", Level.WARN, "nproc 200", id="few processes"),
        pytest.param({"cgroup_pids": 32}, "limit nproc", Level.FAIL, "pids.max 32", id="too few processes"),
        pytest.param({"memlock": 8 << 20}, "limit memlock", Level.NOTE, "8.39 MB", id="little locked memory"),
        pytest.param({}, "processor", Level.OK, "2 cores", id="two cores"),
        pytest.param({"cores": 1}, "processor", Level.WARN, "1 cores", id="one core"),
        pytest.param({"cgroup_cores": 0.5}, "processor", Level.WARN, "quota 0.5", id="a quota"),
    ],
)
def test_limits(changed: dict[str, object], check: str, level: Level, says: str) -> None:
    """Level and words."""
    found = one(judge_limits(replace(LIMITS, **changed), CONNECTIONS), check)  # type: ignore[arg-type]
    assert (found.level, says in found.seen) == (level, True), found


def test_descriptors_are_told_in_callers() -> None:
    """4096 descriptors, 512 of them beside callers, two for each."""
    assert "about 1792 callers" in one(judge_limits(replace(LIMITS, nofile=4096), CONNECTIONS), "limit nofile").cost


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        pytest.param({}, "kernel", Level.OK, "6.18.4", id="a new kernel"),
        pytest.param({"release": (5, 15)}, "kernel", Level.WARN, "6.18.4", id="without MADV_COLLAPSE"),
        pytest.param({"release": (4, 19)}, "kernel", Level.FAIL, "6.18.4", id="without pidfd"),
        pytest.param({}, "io_uring", Level.NOTE, "allowed", id="io_uring"),
        pytest.param({"io_uring": "EPERM"}, "io_uring", Level.NOTE, "refused: EPERM", id="io_uring that is refused"),
        pytest.param({"entropy_bits": 10}, "randomness", Level.WARN, "10 bits", id="a kernel without randomness"),
    ],
)
def test_kernel(changed: dict[str, object], check: str, level: Level, says: str) -> None:
    """Level and words."""
    found = one(judge_kernel(replace(KERNEL, **changed)), check)  # type: ignore[arg-type]
    assert (found.level, says in found.seen) == (level, True), found


@pytest.mark.parametrize(
    ("changed", "check", "level"),
    [
        pytest.param({}, "clock", Level.OK, id="synchronised"),
        pytest.param({"synchronised": False, "error_s": None}, "clock", Level.WARN, id="nobody sets it"),
        pytest.param({"stepped_s": -1.5}, "clock step", Level.WARN, id="it stepped while we looked"),
        pytest.param({"ahead_s": 60.0}, "clock went back", Level.WARN, id="it went back before"),
        pytest.param({"source": "hpet"}, "clock source", Level.NOTE, id="a slow source"),
    ],
)
def test_clock(changed: dict[str, object], check: str, level: Level) -> None:
    """Level."""
    assert one(judge_clock(replace(CLOCK, **changed)), check).level is level  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        pytest.param({}, "GPU", Level.NOTE, "no NVIDIA driver", id="no GPU"),
        pytest.param({"nvidia": "570.1"}, "GPU", Level.NOTE, "NVIDIA driver 570.1", id="a GPU"),
        pytest.param({"torch": ""}, "GPU", Level.FAIL, "torch is not installed", id="no torch"),
        pytest.param(
            {"gpus": (GpuFacts("GPU 0", temperature_c=50, memory_used_bytes=10**9, memory_total_bytes=8 * 10**10),)},
            "GPU 0 health",
            Level.OK,
            "50 C, 1 GB of 80 GB in use",
            id="a healthy GPU",
        ),
        pytest.param(
            {"gpus": (GpuFacts("GPU 0"), GpuFacts("GPU 1", xids=(79,)))},
            "GPU 1 health",
            Level.FAIL,
            "XID 79",
            id="one of two is not",
        ),
        pytest.param(
            {"gpus": (GpuFacts("GPU 0", remap_pending=True),)}, "GPU 0 health", Level.WARN, "rows", id="a degraded one"
        ),
        pytest.param({}, "CRIU", Level.NOTE, "not installed", id="no CRIU"),
        pytest.param({"criu": "Looks good.", "criu_works": True}, "CRIU", Level.NOTE, "works: Looks", id="CRIU"),
    ],
)
def test_devices(changed: dict[str, object], check: str, level: Level, says: str) -> None:
    """Absence is stated."""
    found = one(judge_devices(replace(DEVICES, **changed)), check)  # type: ignore[arg-type]
    assert (found.level, says in found.seen) == (level, True), found


def test_a_good_machine_fails_nothing() -> None:
    """And one bad finding is enough."""
    good = [
        *judge_disk(DISK), *judge_memory(MEMORY), *judge_limits(LIMITS, CONNECTIONS), *judge_kernel(KERNEL),
        *judge_clock(CLOCK), *judge_devices(DEVICES),
    ]  # fmt: skip
    assert not fails(good)
    assert all(finding.level in (Level.OK, Level.NOTE) for finding in good)
    assert fails([*good, *judge_disk(replace(DISK, fault="full"))])


@pytest.mark.parametrize(("count", "want"), [(999, "999 bytes"), (1500, "1.5 kB"), (8e9, "8 GB"), (1.5e13, "15 TB")])
def test_sizes(count: float, want: str) -> None:
    """As people write them."""
    assert as_bytes(count) == want
