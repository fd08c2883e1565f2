"""Memory is that of the process that is named, before, at its peak and after."""

import os
import time

from coldstart_bench.traffic.memory import MIB, Memory, Sample, memory_of, try_sample, wait_for_sample, watching, words


def test_of_this_process() -> None:
    """What it takes while it is watched is seen at the end at the latest."""
    with watching(os.getpid()) as samples:
        taken = bytearray(b"x") * (64 * MIB)
    memory = memory_of(samples)
    assert memory is not None
    assert memory.grown > 50 * MIB
    assert len(taken) == 64 * MIB
    assert f"{memory.peak_pss / MIB:.1f} at the peak" in words(memory)


def test_wait_ends_with_a_sample_from_after_it() -> None:
    """A step's last sample is taken after its last answer. The control: of a process that is gone no sample comes."""
    with watching(os.getpid()) as samples:
        asked_ns = time.monotonic_ns()
        assert wait_for_sample(samples, asked_ns)
        assert samples[-1].at_ns >= asked_ns
    with watching(2**22 + 1) as samples:
        assert not wait_for_sample(samples, time.monotonic_ns(), limit_s=0.0)


def test_of_one_that_is_not_there() -> None:
    """Nothing is said of it."""
    assert try_sample(2**22 + 1) is None
    assert memory_of([]) is None
    assert "not measured" in words(None)


def test_the_peak_is_no_end() -> None:
    """Neither of its two."""
    samples = [Sample(0, 10, 5), Sample(1, 30, 25), Sample(2, 20, 15)]
    assert memory_of(samples) == Memory(10, 30, 20, 5, 25, 15)
