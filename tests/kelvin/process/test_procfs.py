"""The fork time of a process, by the clock that measures its life, is exact even under preemption."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kelvin.process import procfs
from kelvin.process.procfs import start_time_ns

TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
AWAY_NS = 113_000_000
SUSPENDED_NS = 7 * 10**9


def clocks(away: Callable[[int], bool]) -> SimpleNamespace:
    """Return clocks after a suspension of the machine. The reader is preempted before readings that `away` selects."""
    now, readings = 10**12, 0

    def read() -> int:
        nonlocal now, readings
        now += AWAY_NS if away(readings) else 50
        readings += 1
        return now

    def boottime(_: int) -> int:
        return read() + SUSPENDED_NS

    return SimpleNamespace(monotonic_ns=read, clock_gettime_ns=boottime, CLOCK_BOOTTIME=time.CLOCK_BOOTTIME)


def test_start_time_lies_between_two_readings() -> None:
    """The time is by this process's clock, exact to the kernel's tick."""
    before_ns = time.monotonic_ns()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        after_ns = time.monotonic_ns()
        assert before_ns - TICK_NS <= start_time_ns(child.pid) <= after_ns
        child.communicate(b"\n")


@pytest.mark.parametrize("preempted_reading", [1, 3, 5, 9], ids=lambda number: f"before reading {number}")
def test_start_time_is_stable_under_preemption(preempted_reading: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork time that is 113 ms off would bill time that the replica didn't live."""
    monkeypatch.setattr(procfs, "time", clocks(lambda _: False))
    want = start_time_ns(os.getpid())
    monkeypatch.setattr(procfs, "time", clocks(lambda number: number == preempted_reading))
    assert abs(start_time_ns(os.getpid()) - want) < TICK_NS


def test_repeated_preemption_shifts_the_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: preemption before every second reading can't be detected, so it shifts the result."""
    monkeypatch.setattr(procfs, "time", clocks(lambda _: False))
    want = start_time_ns(os.getpid())
    monkeypatch.setattr(procfs, "time", clocks(lambda number: number % 2 == 1))
    assert want - start_time_ns(os.getpid()) >= AWAY_NS - TICK_NS
