"""How `kelvin doctor` judges a machine's measurements: level, cost to callers and fix."""

from collections.abc import Iterable

import pytest

from kelvin.devices.gpu_policy import GpuFacts
from kelvin.doctor.device_checks import judge_driver, judge_gpu
from kelvin.doctor.disk_checks import judge_reading, judge_space, judge_sync
from kelvin.doctor.finding_policy import GB, Finding, FindingLevel, format_bytes, has_failure
from kelvin.doctor.kernel_checks import (
    judge_cores,
    judge_descriptors,
    judge_huge_pages,
    judge_locked_memory,
    judge_processes,
    judge_randomness,
    judge_release,
    judge_size,
    judge_source,
    judge_steps,
    judge_swap,
    judge_synchronisation,
)

CONNECTIONS = 8192
MIB = 1 << 20


def sole(found: Finding | Iterable[Finding]) -> Finding:
    """Return the only finding. A warning or failure must have a cost and a fix."""
    (finding,) = [found] if isinstance(found, Finding) else found
    if finding.level in (FindingLevel.WARN, FindingLevel.FAIL):
        assert finding.cost, finding
        assert finding.mend, finding
    return finding


@pytest.mark.parametrize(
    ("found", "check", "level", "text"),
    [
        pytest.param(judge_reading(3.4 * GB, 128 * MIB), "disk read", FindingLevel.OK, "3.40 GB/s", id="a fast disk"),
        pytest.param(
            judge_reading(0.9 * GB, 128 * MIB), "disk read", FindingLevel.NOTE, "0.90 GB/s", id="a slower one"
        ),
        pytest.param(judge_reading(0.1 * GB, 128 * MIB), "disk read", FindingLevel.WARN, "0.10 GB/s", id="a slow one"),
        pytest.param(judge_reading(None, 0), "disk read", FindingLevel.WARN, "O_DIRECT is refused", id="no O_DIRECT"),
        pytest.param(judge_sync([0.0002] * 50), "disk sync", FindingLevel.OK, "0.20 ms median", id="a fast sync"),
        pytest.param(judge_sync([0.004] * 50), "disk sync", FindingLevel.NOTE, "4.00 ms", id="a sync of 4 ms"),
        pytest.param(judge_sync([0.03] * 50), "disk sync", FindingLevel.WARN, "30.00 ms", id="a sync of 30 ms"),
        pytest.param(
            judge_space(5 * GB, 1000 * GB, 10**6), "disk space", FindingLevel.WARN, "5 GB of 1 TB", id="little room"
        ),
        pytest.param(
            judge_space(10**8, 1000 * GB, 10**6), "disk space", FindingLevel.FAIL, "100 MB of 1 TB", id="no room"
        ),
        pytest.param(judge_space(500 * GB, 1000 * GB, 3), "disk space", FindingLevel.FAIL, "3 inodes", id="no inodes"),
        pytest.param(
            judge_space(500 * GB, 1000 * GB, None),
            "disk space",
            FindingLevel.OK,
            "500 GB",
            id="a file system without inodes",
        ),
        pytest.param(
            judge_huge_pages("", "modes"),
            "huge pages",
            FindingLevel.OK,
            "MADV_COLLAPSE of shared memory works",
            id="huge pages",
        ),
        pytest.param(
            judge_huge_pages("no", "modes"), "huge pages", FindingLevel.WARN, "refused: no", id="no huge pages"
        ),
        pytest.param(judge_size(24 * GB, 20 * GB, None), "memory", FindingLevel.OK, "20 GB of 24 GB", id="memory"),
        pytest.param(
            judge_size(24 * GB, 20 * GB, GB),
            "memory",
            FindingLevel.FAIL,
            "control group 1 GB",
            id="a tight control group",
        ),
        pytest.param(
            judge_size(24 * GB, GB, None), "memory", FindingLevel.WARN, "1 GB of 24 GB", id="memory used by others"
        ),
        pytest.param(judge_swap(0), "swap", FindingLevel.OK, "none", id="no swap"),
        pytest.param(judge_swap(GB), "swap", FindingLevel.NOTE, "1 GB", id="swap"),
        pytest.param(
            judge_descriptors(65536, CONNECTIONS), "limit nofile", FindingLevel.OK, "65536", id="many descriptors"
        ),
        pytest.param(judge_descriptors(None, CONNECTIONS), "limit nofile", FindingLevel.OK, "none", id="no limit"),
        pytest.param(
            judge_descriptors(4096, CONNECTIONS), "limit nofile", FindingLevel.WARN, "4096", id="few descriptors"
        ),
        pytest.param(
            judge_descriptors(256, CONNECTIONS), "limit nofile", FindingLevel.FAIL, "256", id="too few to serve"
        ),
        pytest.param(
            judge_processes(None, None), "limit nproc", FindingLevel.OK, "no limit", id="no limit of processes"
        ),
        pytest.param(judge_processes(200, None), "limit nproc", FindingLevel.WARN, "nproc 200", id="few processes"),
        pytest.param(
            judge_processes(None, 32), "limit nproc", FindingLevel.FAIL, "pids.max 32", id="too few processes"
        ),
        pytest.param(
            judge_locked_memory(None), "limit memlock", FindingLevel.OK, "none", id="no limit of locked memory"
        ),
        pytest.param(
            judge_locked_memory(8 << 20), "limit memlock", FindingLevel.NOTE, "8.39 MB", id="little locked memory"
        ),
        pytest.param(judge_cores(2, None), "processor", FindingLevel.OK, "2 cores", id="two cores"),
        pytest.param(judge_cores(1, None), "processor", FindingLevel.WARN, "1 cores", id="one core"),
        pytest.param(judge_cores(2, 0.5), "processor", FindingLevel.WARN, "quota 0.5", id="a quota"),
        pytest.param(judge_release((6, 18), "6.18.4"), "kernel", FindingLevel.OK, "6.18.4", id="a new kernel"),
        pytest.param(
            judge_release((5, 15), "5.15.1"), "kernel", FindingLevel.WARN, "5.15.1", id="without MADV_COLLAPSE"
        ),
        pytest.param(judge_release((4, 19), "4.19.2"), "kernel", FindingLevel.FAIL, "4.19.2", id="without pidfd"),
        pytest.param(
            judge_randomness(10), "randomness", FindingLevel.WARN, "10 bits", id="a kernel without randomness"
        ),
        pytest.param(
            judge_synchronisation(0.001, "tsc"), "clock", FindingLevel.OK, "within 0.001 s", id="synchronised"
        ),
        pytest.param(
            judge_synchronisation(None, "tsc"), "clock", FindingLevel.WARN, "says the kernel", id="not in sync"
        ),
        pytest.param(judge_steps(-1.5, -10.0), "clock step", FindingLevel.WARN, "-1.500 s", id="a step meanwhile"),
        pytest.param(judge_steps(0.0, 60.0), "clock went back", FindingLevel.WARN, "60 s", id="an earlier step back"),
        pytest.param(judge_source("hpet"), "clock source", FindingLevel.NOTE, "hpet", id="a slow source"),
        pytest.param(judge_driver("", "2.13.0"), "GPU", FindingLevel.NOTE, "no NVIDIA driver", id="no GPU"),
        pytest.param(judge_driver("570.1", "2.13.0"), "GPU", FindingLevel.NOTE, "NVIDIA driver 570.1", id="a GPU"),
        pytest.param(judge_driver("", ""), "GPU", FindingLevel.FAIL, "torch is not installed", id="no torch"),
        pytest.param(
            judge_gpu(GpuFacts("GPU 0", temperature_c=50, memory_used_bytes=10**9, memory_total_bytes=8 * 10**10)),
            "GPU 0 health",
            FindingLevel.OK,
            "50 C, 1 GB of 80 GB in use",
            id="a healthy GPU",
        ),
        pytest.param(
            judge_gpu(GpuFacts("GPU 0")),
            "GPU 0 health",
            FindingLevel.OK,
            "no problem is reported",
            id="a GPU without facts",
        ),
        pytest.param(
            judge_gpu(GpuFacts("GPU 1", xids=(79,))),
            "GPU 1 health",
            FindingLevel.FAIL,
            "XID 79",
            id="a broken GPU",
        ),
        pytest.param(
            judge_gpu(GpuFacts("GPU 0", remap_pending=True)),
            "GPU 0 health",
            FindingLevel.WARN,
            "rows",
            id="a degraded GPU",
        ),
    ],
)
def test_figure_decides_finding_level(
    found: Finding | Iterable[Finding], check: str, level: FindingLevel, text: str
) -> None:
    """The measurement decides level and text."""
    finding = sole(found)
    assert (finding.check, finding.level, text in finding.seen) == (check, level, True), finding


def test_harmless_figures_have_no_finding() -> None:
    """Negative control: good values of randomness, clock step and clock source give no finding."""
    assert [*judge_randomness(256), *judge_randomness(None)] == []
    assert [*judge_steps(0.01, -10.0), *judge_source("tsc"), *judge_source("")] == []


def test_costs_are_in_terms_of_callers() -> None:
    """Costs: reading 8 GB at 0.9 GB/s. 4096 descriptors, less 512 for other uses, at two per caller."""
    assert "8 GB from this disk takes 9 s" in judge_reading(0.9 * GB, 128 * MIB).cost
    assert "about 1792 callers" in judge_descriptors(4096, CONNECTIONS).cost


def test_one_bad_finding_fails() -> None:
    """Notes and warnings don't fail."""
    good = [judge_swap(GB), judge_cores(1, None)]
    assert not has_failure(good)
    assert has_failure([*good, judge_driver("", "")])


@pytest.mark.parametrize(("count", "want"), [(999, "999 bytes"), (1500, "1.5 kB"), (8e9, "8 GB"), (1.5e13, "15 TB")])
def test_sizes_are_formatted_for_people(count: float, want: str) -> None:
    assert format_bytes(count) == want
