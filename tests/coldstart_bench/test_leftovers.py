"""What an installation leaves is found: a process of it, a record that was not shipped, an upload, a socket."""

import os
import subprocess
import sys
from pathlib import Path

from coldstart_bench.leftovers import ended, stray_sockets, unfinished


def test_nothing(tmp_path: Path) -> None:
    """Of a directory that is empty."""
    assert (ended(tmp_path), unfinished(tmp_path), stray_sockets(tmp_path)) == ([], [], [])


def test_a_process(tmp_path: Path) -> None:
    """By the directory that it was started with; another one's is none of ours."""
    command = [sys.executable, "-c", "print(flush=True); import signal; signal.pause()"]
    environment = {**os.environ, "KELVIN_DATA": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert [line for line in ended(tmp_path) if str(process.pid) in line]
            assert ended(tmp_path / "other") == []
        finally:
            process.kill()


def test_files(tmp_path: Path) -> None:
    """Each by its name; what is empty was shipped."""
    places = ("run/meters/12.rt1", "spool/act-1/000", "staging/t/p/declared.json", "run/rt-dead.sock")
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("x")
    (tmp_path / "spool/act-1/001").touch()
    assert ended(tmp_path) == ["a meter page is left: 12.rt1", "records are left: 000"]
    assert unfinished(tmp_path) == ["a push is left: declared.json"]
    assert stray_sockets(tmp_path) == ["the socket of a dead runtime is left: dead"]
