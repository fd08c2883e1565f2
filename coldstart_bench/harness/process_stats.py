"""Read facts about processes from the kernel (proc(5)): which exist, their memory, their CPU time.

Memory is the proportional set size (PSS): shared pages are divided among their processes. Slabs are left out of a
runtime's memory and counted whole, as the cache agent reports them: PSS would divide a slab among all its readers.
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
SAMPLE_S: Final = 10.0  # the sampling thread may get no CPU time for a while
QUIET_S: Final = 0.6  # longer than a standby waits before it warms up
_NOISE_TICKS: Final = 1  # one tick is about 10 ms: an idle event loop needs some


# Processes


def _all_processes() -> dict[int, tuple[int, list[str]]]:
    """Return parent and command line of every process. Processes that end meanwhile are left out."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                found[int(entry)] = int(_stat_fields(int(entry))[1]), words
    return found


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, and so on. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def child_commands(pid: int) -> dict[int, list[str]]:
    """Return the command lines of a process's children, by pid."""
    return {each: words for each, (parent, words) in _all_processes().items() if parent == pid}


def peak_resident_bytes(module: str) -> int:
    """Return the largest VmHWM in bytes of a `python -m MODULE` below this process. 0 if there is none."""
    found, peak = _all_processes(), 0
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
    """Decides from repeated CPU times whether processes have been idle for `quiet_s`. One tick counts as idle. A parked
    standby first warms up; a start is measured from a standby that had time to do so.
    """

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._since_s = 0.0
        self._ticks: int | None = None

    def is_idle(self, ticks: int, now: float) -> bool:
        """Return whether they are idle at `now` (seconds), given their total `ticks`. A lower total than before means
        that the processes changed.
        """
        if self._ticks is None or not 0 <= ticks - self._ticks <= _NOISE_TICKS:
            self._ticks, self._since_s = ticks, now
        return now - self._since_s >= self._quiet_s


def cpu_ticks(pids: Iterable[int]) -> int:
    """Return user plus system time of processes in kernel ticks, over all threads. Ended processes count 0."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += _ticks(pid)
    return total


def processor_us(pid: int) -> int:
    """Return user plus system time of a process, over all threads. Raises OSError if it has ended."""
    return int(_ticks(pid) * 1_000_000 / os.sysconf("SC_CLK_TCK"))


def _ticks(pid: int) -> int:
    fields = _stat_fields(pid)
    return int(fields[11]) + int(fields[12])


class CpuTime(msgspec.Struct, frozen=True):
    """CPU time since the process began, in nanoseconds. `waited_ns` is of its first thread, the event loop's."""

    ran_ns: int
    waited_ns: int


def try_read_cpu_time(pid: int) -> CpuTime | None:
    """Return CPU time of a process and its wait for a CPU (schedstat). None if it ended, or schedstat is missing."""
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
    """CPU time per request. `waited` is the share of the time in which the process waited for its core."""

    each_us: float
    waited: float


def cpu_load(before: CpuTime | None, after: CpuTime | None, requests: int, seconds: float) -> CpuLoad | None:
    """Return the load between two readings. None if one is missing, or there were no requests."""
    if before is None or after is None or not requests or seconds <= 0:
        return None
    ran_ns, waited_ns = after.ran_ns - before.ran_ns, after.waited_ns - before.waited_ns
    return CpuLoad(ran_ns / 1e3 / requests, min(1.0, waited_ns / 1e9 / seconds))


# Samples


@contextlib.contextmanager
def sampling_thread(sample: Callable[[], object], every_s: float, core: int | None = None) -> Iterator[None]:
    """Call `sample` every `every_s` seconds in a thread, optionally pinned to `core`, until the block ends."""
    stop = threading.Event()

    def run() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})  # this thread only
        while not stop.wait(every_s):
            sample()

    thread = threading.Thread(target=run, name="samples")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Sample(msgspec.Struct, frozen=True):
    """Memory of a process at one moment, in bytes, and its CPU time."""

    at_ns: int  # CLOCK_MONOTONIC
    rss: int
    pss: int
    spent: CpuTime | None = None


class MemoryUse(msgspec.Struct, frozen=True):
    """Memory in bytes before the load, at the peak of the samples, and after the last response."""

    before_rss: int
    peak_rss: int
    after_rss: int
    before_pss: int
    peak_pss: int
    after_pss: int

    @property
    def grown(self) -> int:
        """Growth of PSS up to its peak."""
        return max(0, self.peak_pss - self.before_pss)


def memory_line(memory: MemoryUse | None) -> str:
    """Return the memory use as a line for people."""
    if memory is None:
        return "memory of the activator: not measured"
    before, peak, after = (each / MIB for each in (memory.before_pss, memory.peak_pss, memory.after_pss))
    pss = f"{before:.1f} MiB before, {peak:.1f} at the peak, {after:.1f} after"
    return f"memory of the activator (PSS): {pss}; resident {memory.peak_rss / MIB:.1f} MiB at the peak"


def try_sample(pid: int) -> Sample | None:
    """Return a sample, or None if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    found = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return Sample(time.monotonic_ns(), found["Rss"], found["Pss"], try_read_cpu_time(pid))


@contextlib.contextmanager
def sampling_process(pid: int) -> Iterator[list[Sample]]:
    """Yield a list of samples that grows until the block ends. The last sample is taken at the end."""
    samples: list[Sample] = []

    def take() -> None:
        if (sample := try_sample(pid)) is not None:
            samples.append(sample)

    take()
    with sampling_thread(take, EVERY_S, core=max(os.sched_getaffinity(0))):  # the sampled process has the other core
        yield samples
    take()


def wait_for_sample(samples: Sequence[Sample], after_ns: int, limit_s: float = SAMPLE_S) -> bool:
    """Wait for a sample taken after this CLOCK_MONOTONIC time. Return False if none comes within `limit_s`."""
    return poll_until_true(lambda: bool(samples) and samples[-1].at_ns >= after_ns, limit_s, EVERY_S)


def memory_use(samples: list[Sample]) -> MemoryUse | None:
    """Return the memory use of samples in order of time. None without samples."""
    if not samples:
        return None
    first, last = samples[0], samples[-1]
    peak_rss, peak_pss = max(each.rss for each in samples), max(each.pss for each in samples)
    return MemoryUse(first.rss, peak_rss, last.rss, first.pss, peak_pss, last.pss)


def cpu_load_within(samples: Sequence[Sample], began_ns: int, end_us: int, requests: int) -> CpuLoad | None:
    """Return the CPU load between the last sample before the requests and the first one after them, or None."""
    end_ns = began_ns + end_us * 1000
    before = next((each for each in reversed(samples) if each.at_ns <= began_ns), None)
    after = next((each for each in samples if each.at_ns >= end_ns), None)
    if before is None or after is None:
        return None
    return cpu_load(before.spent, after.spent, requests, (after.at_ns - before.at_ns) / 1e9)


# Memory of a start


def pss_outside_slabs(smaps: str) -> int:
    """Return PSS outside slabs in bytes, from the text of /proc/PID/smaps."""
    total, counts = 0, True
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss" and counts:
            total += int(rest.split()[0]) * 1024
        elif "-" in name.partition(" ")[0]:  # first line of a mapping: addresses, ..., mapped file
            counts = SLAB not in line
    return total


def pss_of(pid: int) -> int:
    """Return PSS outside slabs in bytes. 0 if the process has ended."""
    try:
        return pss_outside_slabs(Path(f"/proc/{pid}/smaps").read_text())
    except OSError:
        return 0


def runtimes_below(supervisor: int) -> list[int]:
    """Return the pids of standbys, runtimes and the zygote: the supervisor's children with the zygote's command."""
    return [pid for pid, words in child_commands(supervisor).items() if runs_module(words, "runtime.app.zygote")]


class PssWatch:
    """PSS outside slabs of some processes, by pid: before, and at the peak."""

    def __init__(self, pids: list[int]) -> None:
        self.before = {pid: pss_of(pid) for pid in pids}
        self.peak = dict(self.before)

    def sample(self) -> None:
        """Read the PSS of all processes and update the peaks."""
        for pid in self.peak:
            self.peak[pid] = max(self.peak[pid], pss_of(pid))


@contextlib.contextmanager
def sampling_runtimes(supervisor: int) -> Iterator[PssWatch]:
    """Sample all processes that may become the runtime, until the block ends."""
    watch = PssWatch(runtimes_below(supervisor))
    with sampling_thread(watch.sample, START_EVERY_S):
        yield watch
