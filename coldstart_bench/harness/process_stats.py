"""What the kernel says of processes (proc(5)): which there are, what they have of memory and of processors.

Memory is the proportional set size (PSS): what several processes share is divided among them. Slabs are left out of a
runtime's and counted whole, as the cache agent says, since other readers of a slab would make a part of it disappear.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from coldstart_bench.harness.polling import poll_until_true
from kelvin.process.python_command import runs_module

MIB: Final = 1 << 20
SLAB: Final = "/memfd:kelvin-slab"
EVERY_S: Final = 0.1
START_EVERY_S: Final = 0.01  # a start is short
SAMPLE_S: Final = 10.0  # the sampling thread may get no core for a while
QUIET_S: Final = 0.6  # longer than a standby is parked before it warms up
_NOISE_TICKS: Final = 1  # of some 10 ms: what a loop that waits takes


# Which there are


def _all() -> dict[int, tuple[int, list[str]]]:
    """Parent and command line of every process; what ends meanwhile is left out."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                found[int(entry)] = int(_stat(int(entry))[1]), words
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, and so on. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def child_commands(pid: int) -> dict[int, list[str]]:
    """Command lines of a process's own children, by process id."""
    return {each: words for each, (parent, words) in _all().items() if parent == pid}


def peak_resident_bytes(module: str) -> int:
    """The most resident memory in bytes (VmHWM) of a `python -m MODULE` below this process, 0 where there is none."""
    found, peak = _all(), 0
    for pid, (parent, words) in found.items():
        if runs_module(words, module):
            while parent not in (0, os.getpid()):
                parent = found[parent][0] if parent in found else 0
            if parent:
                with contextlib.suppress(OSError):
                    peak = max(peak, _resident_peak(pid))
    return peak


def _resident_peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


# Processor time


class IdleDetector:
    """Told processor time of processes again and again, says whether they have been idle for `quiet_s`.

    A tick counts as idle. A parked standby warms up first; what is measured is a start of one that had the time to.
    """

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._since_s = 0.0
        self._ticks: int | None = None

    def is_idle(self, ticks: int, now: float) -> bool:
        """`ticks` of all of them at `now`, in seconds. Fewer than before: another process is there."""
        if self._ticks is None or not 0 <= ticks - self._ticks <= _NOISE_TICKS:
            self._ticks, self._since_s = ticks, now
        return now - self._since_s >= self._quiet_s


def cpu_ticks(pids: Iterable[int]) -> int:
    """User and system time of processes, all threads, in the kernel's ticks; one that has ended counts nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += _ticks(pid)
    return total


def processor_us(pid: int) -> int:
    """User and system time of a process, all threads. Raises OSError where it has ended."""
    return int(_ticks(pid) * 1_000_000 / os.sysconf("SC_CLK_TCK"))


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12])


class CpuTime(msgspec.Struct, frozen=True):
    """Since the process began; nanoseconds. `waited_ns` is its first thread's, which is the event loop's."""

    ran_ns: int
    waited_ns: int


def try_read_cpu_time(pid: int) -> CpuTime | None:
    """What a process had of processors, and how long it stood in line for one (schedstat). None where it has ended, or
    where the kernel does not say.
    """
    try:
        of_threads = {task: _schedstat(pid, task) for task in os.listdir(f"/proc/{pid}/task")}
        return CpuTime(sum(ran for ran, _ in of_threads.values()), of_threads[str(pid)][1])
    except (OSError, KeyError):
        return None


def _schedstat(pid: int, task: str) -> tuple[int, int]:
    try:
        words = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
    except FileNotFoundError:  # that thread has ended
        return 0, 0
    return int(words[0]), int(words[1])


class CpuLoad(msgspec.Struct, frozen=True):
    """What so many requests took of it. `waited` is the share of the time in which others had its core."""

    each_us: float
    waited: float


def cpu_load(before: CpuTime | None, after: CpuTime | None, requests: int, seconds: float) -> CpuLoad | None:
    """Between two looks; None where one is missing, or nothing was asked."""
    if before is None or after is None or not requests or seconds <= 0:
        return None
    ran_ns, waited_ns = after.ran_ns - before.ran_ns, after.waited_ns - before.waited_ns
    return CpuLoad(ran_ns / 1e3 / requests, min(1.0, waited_ns / 1e9 / seconds))


# Samples


@contextlib.contextmanager
def sampling_thread(take: Callable[[], object], every_s: float, core: int | None = None) -> Iterator[None]:
    """Calls `take` again and again, in a thread of its own (on that core), until the block ends."""
    stop = threading.Event()

    def run() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})  # of this thread
        while not stop.wait(every_s):
            take()

    thread = threading.Thread(target=run, name="samples")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Sample(msgspec.Struct, frozen=True):
    """A process under load at one moment; bytes."""

    at_ns: int  # CLOCK_MONOTONIC
    rss: int
    pss: int
    spent: CpuTime | None = None  # of processors


class MemoryUse(msgspec.Struct, frozen=True):
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


def memory_line(memory: MemoryUse | None) -> str:
    """Return it as the text that a person reads."""
    if memory is None:
        return "memory of the activator: not measured"
    before, peak, after = (each / MIB for each in (memory.before_pss, memory.peak_pss, memory.after_pss))
    pss = f"{before:.1f} MiB before, {peak:.1f} at the peak, {after:.1f} after"
    return f"memory of the activator (PSS): {pss}; resident {memory.peak_rss / MIB:.1f} MiB at the peak"


def try_sample(pid: int) -> Sample | None:
    """None where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    found = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return Sample(time.monotonic_ns(), found["Rss"], found["Pss"], try_read_cpu_time(pid))


@contextlib.contextmanager
def sampling_process(pid: int) -> Iterator[list[Sample]]:
    """Grows until the block ends; the last sample is of its end."""
    samples: list[Sample] = []

    def take() -> None:
        if (sample := try_sample(pid)) is not None:
            samples.append(sample)

    take()
    with sampling_thread(take, EVERY_S, core=max(os.sched_getaffinity(0))):  # who is watched has the other one
        yield samples
    take()


def wait_for_sample(samples: Sequence[Sample], after_ns: int, limit_s: float = SAMPLE_S) -> bool:
    """Wait until a sample was taken after that moment of CLOCK_MONOTONIC. False if none came within `limit_s`."""
    return poll_until_true(lambda: bool(samples) and samples[-1].at_ns >= after_ns, limit_s, EVERY_S)


def memory_use(samples: list[Sample]) -> MemoryUse | None:
    """Of what was sampled, in order; None of nothing."""
    if not samples:
        return None
    first, last = samples[0], samples[-1]
    peak_rss, peak_pss = max(each.rss for each in samples), max(each.pss for each in samples)
    return MemoryUse(first.rss, peak_rss, last.rss, first.pss, peak_pss, last.pss)


def cpu_load_within(samples: Sequence[Sample], began_ns: int, end_us: int, requests: int) -> CpuLoad | None:
    """What so many requests took, between the last sample before they began and the first one after they ended."""
    end_ns = began_ns + end_us * 1000
    before = next((each for each in reversed(samples) if each.at_ns <= began_ns), None)
    after = next((each for each in samples if each.at_ns >= end_ns), None)
    if before is None or after is None:
        return None
    return cpu_load(before.spent, after.spent, requests, (after.at_ns - before.at_ns) / 1e9)


# Memory of a start


def pss_outside_slabs(smaps: str) -> int:
    """Bytes, of the text of /proc/PID/smaps."""
    total, counts = 0, True
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss" and counts:
            total += int(rest.split()[0]) * 1024
        elif "-" in name.partition(" ")[0]:  # a mapping begins: its addresses, and at the end what is mapped
            counts = SLAB not in line
    return total


def pss_of(pid: int) -> int:
    """Bytes outside slabs, 0 where it has ended."""
    try:
        return pss_outside_slabs(Path(f"/proc/{pid}/smaps").read_text())
    except OSError:
        return 0


def runtimes_below(supervisor: int) -> list[int]:
    """Standbys, runtimes and the zygote itself: children of the supervisor that are forks of one program."""
    return [pid for pid, words in child_commands(supervisor).items() if runs_module(words, "runtime.app.zygote")]


class PssWatch:
    """PSS outside slabs of some processes, by process id: before, and at the peak."""

    def __init__(self, pids: list[int]) -> None:
        self.before = {pid: pss_of(pid) for pid in pids}
        self.peak = dict(self.before)

    def take(self) -> None:
        """Look at all of them."""
        for pid in self.peak:
            self.peak[pid] = max(self.peak[pid], pss_of(pid))


@contextlib.contextmanager
def sampling_runtimes(supervisor: int) -> Iterator[PssWatch]:
    """Samples all that may become the runtime, until the block ends."""
    watch = PssWatch(runtimes_below(supervisor))
    with sampling_thread(watch.take, START_EVERY_S):
        yield watch
