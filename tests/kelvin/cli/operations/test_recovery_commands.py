"""`kelvin backup` and `kelvin restore` as commands: refusals with a hint, locks and interrupted output."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from controlplane.db.database import open_database
from kelvin.cli.operations.recovery_commands import run_for_output
from kelvin.supervisor.data_lock import AlreadyRunning, data_lock
from tests.controlplane.builders import back_up_and_enter_one, installed
from tests.controlplane.control_plane_server import control_plane_process
from tests.controlplane.machine_fixture import ROOT
from tests.controlplane.postgres_server import PostgresServer
from tests.runtime.processes import poll_until

URL = "postgresql://kelvin@db.example/kelvin"


def kelvin(*words: str, database: str = "") -> tuple[int, str]:
    """Return exit code and output of the command."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KELVIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "kelvin.cli.main", *words],
        cwd=ROOT,
        env=ours | ({"KELVIN_DATABASE": database} if database else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


async def test_restore_is_refused_while_a_database_is_set(tmp_path: Path) -> None:
    """The refusal names the setting and what to do, and changes nothing. A backup can still be checked. Control:
    without the setting it is restored."""
    file, new = tmp_path / "made.backup", tmp_path / "new"
    async with installed(tmp_path) as world:
        await world.back_up(file)
    code, output = kelvin("restore", str(file), "--data", str(new), database=URL)
    assert (code, new.exists()) == (1, False)
    for word in ("KELVIN_DATABASE is set", "pg_restore", "unset KELVIN_DATABASE"):
        assert word in output
    assert "db.example" not in output
    assert kelvin("restore", str(file), "--check", database=URL)[0] == 0
    code, output = kelvin("restore", str(file), "--data", str(new))
    assert (code, "next: `kelvin up`, `kelvin billing verify`" in output) == (0, True)
    assert (new / "kelvin.db").exists()


async def test_restore_names_the_command_that_enters_the_journal(tmp_path: Path) -> None:
    """The backup is restored all the same. The suggested command enters the missing journal entries."""
    file = await back_up_and_enter_one(tmp_path)
    new = str(tmp_path / "new")
    code, output = kelvin("restore", str(file), "--data", new)
    assert code == 2
    assert "1 entries are missing" in output
    assert f"`kelvin restore {tmp_path / 'place'} --replace`" in output
    assert kelvin("restore", str(tmp_path / "place"), "--replace", "--data", new)[0] == 0


def test_nothing_is_restored_under_a_control_plane_that_runs(tmp_path: Path) -> None:
    """A running control plane would keep writing to the replaced files and lose its work. It may run without a
    supervisor and its lock. Control: the restore succeeds after it ends."""
    data, file = tmp_path / "data", tmp_path / "made.backup"
    data.mkdir()
    words = ("restore", str(file), "--replace", "--data", str(data))
    with control_plane_process(data) as process:
        poll_until("it serves", lambda: (data / "run" / "control.sock").exists() or None)
        assert kelvin("backup", str(file), "--data", str(data))[0] == 0
        code, output = kelvin(*words)
        assert (code, "a control plane runs in" in output) == (1, True), output
        assert kelvin("restore", str(file), "--check")[0] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert kelvin(*words)[0] == 0


def test_killed_restore_command_leaves_the_lock_held(tmp_path: Path) -> None:
    """The restore runs in a child that outlives the command and keeps the lock, so no `kelvin up` can start."""
    data, source = tmp_path / "data", tmp_path / "source"
    os.mkfifo(source)
    command = [sys.executable, "-m", "kelvin.cli.main", "restore", str(source), "--data", str(data)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        poll_until("it runs the program", lambda: psutil.Process(process.pid).children() or None)
    finally:
        process.kill()
        process.wait(60)
    is_free = _is_free(data)
    source.write_bytes(b"")  # ends the child's wait for its source, which holds no backup
    assert not is_free
    poll_until("the program has ended", lambda: _is_free(data) or None)


def _is_free(data: Path) -> bool:
    try:
        with data_lock(data):
            return True
    except AlreadyRunning:
        return False


@pytest.mark.parametrize(
    "is_file", [pytest.param(False, id="PostgreSQL"), pytest.param(True, id="the control: a file")]
)
def test_external_database_is_refused_by_backup(tmp_path: Path, is_file: bool) -> None:
    """The running installation refuses with the setting and the tool to use."""
    data, file = tmp_path / "data", tmp_path / "made.backup"
    data.mkdir()
    with (
        PostgresServer() as postgres,
        control_plane_process(data, **({} if is_file else {"database": postgres.database().url})),
    ):
        poll_until("it serves", lambda: (data / "run" / "control.sock").exists() or None)
        code, output = kelvin("backup", str(file), "--data", str(data))
    assert (code, file.exists()) == ((0, True) if is_file else (1, False)), output
    for word in ("KELVIN_DATABASE", "pg_dump"):
        assert (word in output) is not is_file


def test_a_program_that_says_more_than_a_pipe_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output larger than a pipe's buffer is read to its end."""
    (tmp_path / "talkative.py").write_text("import sys; sys.stderr.write('x' * (1 << 20)); print('whole')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert b"".join(run_for_output("talkative", [], otherwise="nothing was written")) == b"whole\n"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_partly_written_backup_fails(tmp_path: Path, unbuffered: str) -> None:
    """If the disk is full before the last byte, the command fails and prints no digest."""
    open_database(tmp_path / "kelvin.db").close()
    to = tmp_path / "made.backup"

    def back_up(limit_bytes: int) -> subprocess.CompletedProcess[str]:
        limit = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, -1))"
        command = [sys.executable, "-c", f"{limit}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"]
        words = ["-m", "kelvin.cli.main", "backup", "-", "--data", str(tmp_path)]
        with to.open("wb") as file:
            return subprocess.run(
                command + words,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )

    assert back_up(-1).returncode == 0
    done = back_up(to.stat().st_size - 1)
    assert (done.returncode, done.stderr) == (1, "Error: standard output can't be written: File too large\n")
