"""Measurements of one process: idleness, memory and processor time."""

import os
import threading
import time

import pytest

from coldstart_bench.harness.process_stats import (
    MIB,
    CpuLoad,
    CpuTime,
    IdleDetector,
    MemoryUse,
    Sample,
    cpu_load,
    cpu_ticks,
    memory_line,
    memory_use,
    pss_outside_slabs,
    sampling_process,
    try_read_cpu_time,
    try_sample,
    wait_for_sample,
)


@pytest.mark.parametrize(
    ("seen", "want"),
    [
        pytest.param([(0.0, 5), (0.5, 5), (0.6, 5)], [False, False, True], id="quiet for the whole period"),
        pytest.param(
            [(0.0, 5), (0.5, 9), (0.6, 9), (1.1, 9)], [False, False, False, True], id="work restarts the period"
        ),
        pytest.param([(0.0, 5), (0.3, 6), (0.6, 6)], [False, False, True], id="a tick is noise"),
        pytest.param([(0.0, 5), (0.3, 6), (0.6, 7)], [False, False, False], id="a tick each time is work"),
        pytest.param([(0.0, 5), (0.5, 1), (0.7, 1)], [False, False, False], id="another process is there"),
    ],
)
def test_idle_detector_watches_cpu_time_alone(seen: list[tuple[float, int]], want: list[bool]) -> None:
    """A process is idle after a period with at most one tick of processor time."""
    rest = IdleDetector(0.6)
    assert [rest.is_idle(ticks, now) for now, ticks in seen] == want


def test_the_time_that_a_process_takes_is_seen() -> None:
    """The processor time of this process grows. A missing process has none."""
    before, limit = cpu_ticks([os.getpid()]), time.monotonic() + 30
    while cpu_ticks([os.getpid(), 0]) < before + 3:
        assert time.monotonic() < limit
    assert cpu_ticks([0]) == 0


def test_memory_of_this_process() -> None:
    """Memory allocated during sampling is in the last sample."""
    with sampling_process(os.getpid()) as samples:
        taken = bytearray(b"x") * (64 * MIB)
    memory = memory_use(samples)
    assert memory is not None
    assert memory.grown > 50 * MIB
    assert len(taken) == 64 * MIB
    assert f"{memory.peak_pss / MIB:.1f} at the peak" in memory_line(memory)


def test_wait_ends_with_a_sample_from_after_it() -> None:
    """The wait ends with a sample taken after its start. A missing process gives no sample (control)."""
    with sampling_process(os.getpid()) as samples:
        asked_ns = time.monotonic_ns()
        assert wait_for_sample(samples, asked_ns)
        assert samples[-1].at_ns >= asked_ns
    with sampling_process(2**22 + 1) as samples:
        assert not wait_for_sample(samples, time.monotonic_ns(), limit_s=0.0)


def test_memory_of_a_process_that_is_not_there() -> None:
    assert try_sample(2**22 + 1) is None
    assert memory_use([]) is None
    assert "not measured" in memory_line(None)


def test_memory_peak_differs_from_start_and_end() -> None:
    """Start, peak and end are reported separately."""
    samples = [Sample(0, 10, 5), Sample(1, 30, 25), Sample(2, 20, 15)]
    assert memory_use(samples) == MemoryUse(10, 30, 20, 5, 25, 15)


def test_processor_time_of_this_process() -> None:
    """Processor time of another thread is counted."""
    before = try_read_cpu_time(os.getpid())

    def compute() -> None:
        until_ns = time.thread_time_ns() + 80_000_000
        while time.thread_time_ns() < until_ns:
            pass
        counted.append(try_read_cpu_time(os.getpid()))

    counted: list[CpuTime | None] = []
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert before is not None
    assert counted[0] is not None
    assert counted[0].ran_ns - before.ran_ns > 40_000_000  # the kernel's accounting is coarse


def test_processor_time_of_a_process_that_is_not_there() -> None:
    """A missing process has no processor time, and no load is computed from it or for zero requests."""
    assert try_read_cpu_time(2**22 + 1) is None
    assert cpu_load(None, CpuTime(1, 1), 1, 1.0) is None
    assert cpu_load(CpuTime(0, 0), CpuTime(1, 1), 0, 1.0) is None
    assert cpu_load(CpuTime(0, 0), CpuTime(2_000_000, 500_000_000), 4, 1.0) == CpuLoad(500.0, 0.5)


SMAPS = """7f0000000000-7f0010000000 r--s 00000000 00:01 12 /memfd:kelvin-slab (deleted)
Size:             262144 kB
Pss:              131072 kB
Pss_Dirty:             0 kB
7f1000000000-7f1000001000 rw-p 00000000 00:00 0
Pss:                   4 kB
7f2000000000-7f2000003000 r-xp 00000000 fe:00 77 /usr/lib/libc.so.6
Pss:                   3 kB
VmFlags: rd ex
"""


def test_slabs_are_left_out_of_a_process_own_memory() -> None:
    assert pss_outside_slabs(SMAPS) == 7 * 1024
