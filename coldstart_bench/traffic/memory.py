"""What a process has of memory while it is under load, sampled: resident, and its proportional share (PSS, proc(5)).

With each sample goes what it had of processors by then (`processor`).
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from coldstart_bench.patience import comes
from coldstart_bench.traffic.processor import Load, Spent, load_of, try_spent

EVERY_S: Final = 0.1
SAMPLE_S: Final = 10.0  # the sampling thread may get no core for a while
MIB: Final = 1 << 20


class Sample(msgspec.Struct, frozen=True):
    """At one moment; bytes."""

    at_ns: int  # CLOCK_MONOTONIC
    rss: int
    pss: int
    spent: Spent | None = None  # of processors


class Memory(msgspec.Struct, frozen=True):
    """Before, at the peak, and when all had been answered; bytes. The peak is of what was sampled."""

    before_rss: int
    peak_rss: int
    after_rss: int
    before_pss: int
    peak_pss: int
    after_pss: int

    @property
    def grown(self) -> int:
        """By how much the proportional share was higher at its peak."""
        return max(0, self.peak_pss - self.before_pss)


def try_sample(pid: int) -> Sample | None:
    """None where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    found = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return Sample(time.monotonic_ns(), found["Rss"], found["Pss"], try_spent(pid))


def memory_of(samples: list[Sample]) -> Memory | None:
    """Of what was sampled, in order; None of nothing."""
    if not samples:
        return None
    first, last = samples[0], samples[-1]
    peak_rss, peak_pss = max(each.rss for each in samples), max(each.pss for each in samples)
    return Memory(first.rss, peak_rss, last.rss, first.pss, peak_pss, last.pss)


def load_within(samples: Sequence[Sample], began_ns: int, end_us: int, requests: int) -> Load | None:
    """What so many requests took, between the last sample before they began and the first one after they ended."""
    end_ns = began_ns + end_us * 1000
    before = next((each for each in reversed(samples) if each.at_ns <= began_ns), None)
    after = next((each for each in samples if each.at_ns >= end_ns), None)
    if before is None or after is None:
        return None
    return load_of(before.spent, after.spent, requests, (after.at_ns - before.at_ns) / 1e9)


@contextmanager
def watching(pid: int) -> Iterator[list[Sample]]:
    """Grows until the block ends; the last sample is of its end."""
    samples: list[Sample] = []
    stop = threading.Event()

    def take() -> None:
        if (sample := try_sample(pid)) is not None:
            samples.append(sample)

    def run() -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of this thread: who is watched has the other one
        while not stop.wait(EVERY_S):
            take()

    take()
    thread = threading.Thread(target=run, name="memory")
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
        take()


def wait_for_sample(samples: Sequence[Sample], after_ns: int, limit_s: float = SAMPLE_S) -> bool:
    """Wait until a sample was taken after that moment of CLOCK_MONOTONIC. False if none came within `limit_s`."""
    return comes(lambda: bool(samples) and samples[-1].at_ns >= after_ns, limit_s, EVERY_S)


def words(memory: Memory | None) -> str:
    """Return it as the text that a person reads."""
    if memory is None:
        return "memory of the activator: not measured"
    before, peak, after = (each / MIB for each in (memory.before_pss, memory.peak_pss, memory.after_pss))
    pss = f"{before:.1f} MiB before, {peak:.1f} at the peak, {after:.1f} after"
    return f"memory of the activator (PSS): {pss}; resident {memory.peak_rss / MIB:.1f} MiB at the peak"
