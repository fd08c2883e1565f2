"""A service runs during its block and ends with it. One that never becomes ready reports its output."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from coldstart_bench.harness import service_runner
from coldstart_bench.harness.installation import InstallationFailed
from coldstart_bench.harness.service_runner import running_service

READY = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()"


def test_service_runs_only_within_the_block(tmp_path: Path) -> None:
    """The service runs inside the block and is gone afterwards."""
    command = [sys.executable, "-c", READY, str(tmp_path / "ready")]
    with running_service(command, os.environ, tmp_path / "log", (tmp_path / "ready").exists, "it") as pid:
        assert psutil.Process(pid).is_running()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param("print('no such port'); raise SystemExit(3)", "no such port", id="it ends"),
        pytest.param("import signal; signal.pause()", "did not start: $", id="it never is ready"),
    ],
)
def test_unready_service_fails_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    """The error has the last output, and no process is left."""
    monkeypatch.setattr(service_runner, "READY_S", 1.0)
    command = [sys.executable, "-c", program]
    before = set(psutil.Process().children())
    with (
        pytest.raises(InstallationFailed, match=said),
        running_service(command, os.environ, tmp_path / "log", lambda: False, "it"),
    ):
        pass
    assert set(psutil.Process().children()) <= before


def test_children_of_a_service_end_with_it(tmp_path: Path) -> None:
    """Children end with their service, even if it does not end them."""
    child = "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']).pid"
    program = f"import pathlib, signal, subprocess, sys; pathlib.Path(sys.argv[1]).write_text(str({child}))"
    program += "; signal.pause()"
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", program, str(pid)]
    with running_service(command, os.environ, tmp_path / "log", lambda: pid.exists() and bool(pid.read_text()), "it"):
        started = psutil.Process(int(pid.read_text()))
        assert started.is_running()
    psutil.wait_procs([started], timeout=30)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE
