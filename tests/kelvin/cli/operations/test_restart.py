"""`kelvin restart` without a real installation. `tests/e2e/failures/test_hot_restart.py` uses one."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from kelvin.cli.main import main


@pytest.mark.parametrize(
    "lock",
    [
        pytest.param(None, id="no data directory"),
        pytest.param("", id="an empty lock file"),
        pytest.param(str(os.getpid()), id="a process that isn't a supervisor"),
        pytest.param("999999999", id="a process that has ended"),
    ],
)
def test_restart_without_an_installation_says_so(tmp_path: Path, lock: str | None) -> None:
    """The command says so, signals no process and creates nothing."""
    data = tmp_path / "data"
    if lock is not None:
        (data / "run").mkdir(parents=True)
        (data / "lock").write_text(lock)
    done = CliRunner().invoke(main, ["restart", "activator", "--data", str(data)])
    assert done.exit_code == 1
    assert "no installation runs" in done.output
    assert data.exists() == (lock is not None)


SUPERVISOR = """
import os, pathlib, signal, sys, threading
from kelvin.ipc.socket_directory import SocketDirectory
data = pathlib.Path(sys.argv[2])
(data / "lock").write_text(str(os.getpid()))
directory = SocketDirectory(data / "run")
door = directory.listen("activator.sock")
signal.signal(signal.SIGUSR1, lambda *_: (data / "run" / "succession").write_text("it is not ready\\n"))
print("up", flush=True)
threading.Event().wait()
"""


def test_supervisor_without_an_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor writes to standard error and has no log file, so the hint names its process."""
    monkeypatch.setattr("kelvin.cli.operations.installation_commands.RESTART_TIMEOUT_S", 0.1)
    (tmp_path / "run").mkdir(mode=0o700)
    program = SUPERVISOR.replace('(data / "run" / "succession").write_text("it is not ready\\n")', "None")
    with subprocess.Popen([sys.executable, "-c", program, "up", str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            done = CliRunner().invoke(main, ["restart", "activator", "--data", str(tmp_path)])
        finally:
            process.kill()
    assert done.exit_code == 1
    assert f"see the standard error of `kelvin up`, process {process.pid}" in done.output


def test_end_of_the_installation_is_told_at_once(tmp_path: Path) -> None:
    """The command doesn't wait, because nothing would replace the activator."""
    (tmp_path / "run").mkdir(mode=0o700)
    program = SUPERVISOR.replace('(data / "run" / "succession").write_text("it is not ready\\n")', "os._exit(0)")
    with subprocess.Popen([sys.executable, "-c", program, "up", str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        done = CliRunner().invoke(main, ["restart", "activator", "--data", str(tmp_path)])
    assert (done.exit_code, done.output) == (1, "Error: the installation ended before the activator was restarted\n")


def test_failed_restart_says_why(tmp_path: Path) -> None:
    """The supervisor's reason is printed at once. An earlier reason is ignored."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "succession").write_text("an earlier one\n")
    command = [sys.executable, "-c", SUPERVISOR, "up", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            done = CliRunner().invoke(main, ["restart", "activator", "--data", str(tmp_path)])
            assert psutil.pid_exists(process.pid)
        finally:
            process.kill()
    assert (done.exit_code, done.output) == (1, "Error: it is not ready\n")
