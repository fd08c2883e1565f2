"""Fault injection of a soak: where redis-server is found, and when a killed process counts as back."""

import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from coldstart_bench.clock import SteppedClock
from coldstart_bench.harness.fault_injection import FaultInjector, try_find_redis
from coldstart_bench.harness.installation import Installation


def program(directory: Path) -> Path:
    directory.mkdir()
    made = directory / "redis-server"
    made.touch(mode=0o700)
    return made


def test_redis_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-server is found beside the Python interpreter, otherwise on the path."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert try_find_redis() is None
    elsewhere = program(tmp_path / "path")
    assert try_find_redis() == str(elsewhere)
    own = program(tmp_path / "bin")
    assert try_find_redis() == str(own)


class Answering:
    """A stub installation with healthy processes and these ready replicas."""

    def __init__(self) -> None:
        self.pids: list[int] = [7]
        self.admin = self

    def request(self, method: str, path: str) -> Any:
        return {"processes": [{"healthy": True, "ready": True}]}

    def model(self, name: str) -> Any:
        return {"versions": [{"replicas": [{"pid": pid, "state": "ready"} for pid in self.pids]}]}


def test_a_runtime_that_was_killed_is_not_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed runtime counts as down until another replica is ready, even while the status still lists it."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append((pid, number)))
    kelvin = Answering()
    faults = FaultInjector(cast(Installation, kelvin), "m", None, SteppedClock(tmp_path / "clock"))
    assert faults.serves()
    faults._kill_runtime()
    assert killed == [(7, signal.SIGKILL)]
    assert not faults.serves()
    kelvin.pids = []
    assert not faults.serves()
    assert faults.is_ready()
    kelvin.pids = [8]
    assert faults.serves()


def test_a_fault_that_could_not_be_done_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that could not be injected is reported by name, and none is injected after the load has failed."""
    monkeypatch.setattr("coldstart_bench.harness.fault_injection.WHOLE_S", 0.1)
    kelvin = Answering()
    kelvin.pids = []
    faults = FaultInjector(cast(Installation, kelvin), "m", None, SteppedClock(tmp_path / "clock"))
    faults._all = [("SIGKILL runtime", faults._kill_runtime, faults.is_ready)]
    (event,) = faults.run(0.05, time.monotonic() + 0.1, lambda: False)
    assert (event.what, event.failed) == ("SIGKILL runtime", "none is ready")
    began = time.monotonic()
    assert faults.run(60.0, time.monotonic() + 600.0, lambda: True) == []
    assert time.monotonic() - began < 30
