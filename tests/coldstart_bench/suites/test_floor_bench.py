"""`kelvin bench floor` as a process, and its rows."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coldstart_bench.harness.program_runner import Program, ProgramFailed
from coldstart_bench.suites.floor_bench import floor_rows, floors_of
from tests.process_state import stop


@pytest.mark.deep
def test_every_floor_is_measured_or_says_why_not(tmp_path: Path) -> None:
    """Every floor has a row, except those that the machine lacks, and no file is left."""
    scratch, weights, report = tmp_path / "scratch", tmp_path / "weights", tmp_path / "report.json"
    scratch.mkdir()
    weights.write_bytes(os.urandom((9 << 20) + 777))  # a whole piece, and a tail that is not a whole page
    words = ["bench", "floor", str(weights), "--repeats", "1", "--json", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "kelvin.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    named = {row["name"]: row for row in found["rows"]}
    absent = {failed["system"] for failed in found["failures"]}
    assert set(named) | absent == {floor.name for floor in floors_of(1)}
    # Not every file system supports O_DIRECT.
    assert all("device" in name or "O_DIRECT" in name for name in absent), absent
    assert all(f"{name}: not measured: " in done.stdout for name in absent)
    assert found["bytes"] == weights.stat().st_size
    assert all(row["n"] == 1 and row["median"] > 0 for row in named.values())
    assert named["fork of a process with torch"]["unit"] == "ms"
    assert "BLAKE3, one core" in done.stdout
    assert list(scratch.iterdir()) == []


def test_rows_are_rates_where_bytes_move_and_milliseconds_elsewhere() -> None:
    copied, forked = floor_rows({"copy": [(0.5, 10**9), (0.25, 10**9), (1.0, 10**9)], "fork": [(0.004, 0)]})
    assert (copied.median, copied.low, copied.high, copied.unit, copied.n) == (2.0, 1.0, 4.0, "GB/s", 3)
    assert (forked.median, forked.unit) == (4.0, "ms")


def test_a_floor_reads_every_byte_or_says_that_it_did_not(tmp_path: Path) -> None:
    """The program reads every byte, reports a missing file, and handles the next request."""
    (tmp_path / "a").write_bytes(bytes(20_000))
    (tmp_path / "b").write_bytes(bytes(4096))
    with Program("floors.floor_read") as floor:
        for direct in (False, True):
            answer = floor.call(files=[str(tmp_path / "a"), str(tmp_path / "b")], threads=2, direct=direct)
            assert answer["bytes"] == 24_096
            assert answer["seconds"] > 0
        with pytest.raises(ProgramFailed, match="No such file"):
            floor.call(files=[str(tmp_path / "c")], threads=1, direct=True)
        assert floor.call(files=[], threads=1, direct=False)["bytes"] == 0


def test_missing_or_silent_program_is_reported() -> None:
    """The error has the last output. A program that does not answer is killed at the deadline."""
    with pytest.raises(ProgramFailed, match="No module named"), Program("no_such_loader"):
        pass
    with Program("floors.floor_read") as stopped:
        stop(stopped.pid)
        stopped.answer_s = 0.05
        with pytest.raises(ProgramFailed, match="did not answer"):
            stopped.call(files=[], threads=1, direct=False)
        assert not Path(f"/proc/{stopped.pid}").exists()
        with pytest.raises(ProgramFailed, match="ended with -9"):
            stopped.call(files=[], threads=1, direct=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_ended_bench_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """A benchmark ended by a signal removes its files and processes first, and does not exit with 0."""
    heeding = ["env", "--default-signal=INT,TERM"]  # a shell's background job ignores Ctrl-C
    words = [*heeding, sys.executable, "-m", "kelvin.cli.main", "bench", "floor", "--size", "0.1", "--repeats", "1000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=environment, text=True, start_new_session=True) as bench:
        assert bench.stderr is not None
        while "round 2" not in (line := bench.stderr.readline()):
            assert line
        (made,) = tmp_path.iterdir()
        assert made.name.startswith("kelvin-bench-")
        assert len(_of(tmp_path)) > 1, "it runs its own programs"
        bench.send_signal(number)
        bench.communicate()
        assert bench.returncode not in (0, -number)
    assert list(tmp_path.iterdir()) == []
    assert _of(tmp_path) == []


def _of(place: Path) -> list[int]:
    """Return the processes whose TMPDIR is this directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={place}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
