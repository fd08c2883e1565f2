"""`kelvin bench front` from outside, small, with the loader that needs nothing installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep


@pytest.mark.timeout(300)
def test_a_small_front(tmp_path: Path) -> None:
    """Every system that is here has rows, each answer of ours has its record, streams come; nothing is left."""
    scratch, report = tmp_path / "scratch", tmp_path / "report.json"
    scratch.mkdir()
    words = ["--loader", "own", "--rounds", "1", "--seconds", "1", "--connections", "1,4", "--no-peers", "--json"]
    words.append(str(report))
    done = subprocess.run(
        [sys.executable, "-m", "kelvin.main", "bench", "front", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(scratch.iterdir()) == []
    found = json.loads(report.read_text())
    absent = {failed["system"] for failed in found["failures"]}
    assert absent <= {"nginx"}
    systems = {"upstream alone", "nginx", "kelvin"} - absent
    assert {(row["connections"], row["system"]) for row in found["rows"]} == {
        (number, system) for number in (1, 4) for system in systems
    }
    for row in found["rows"]:
        assert row["requests_per_s"] > 0, row
        assert row["bad"] == 0, row
        assert (row["processor_us"] is not None) == (row["system"] == "kelvin")
    assert (found["unrecorded"], found["loader"]) == (0, "a loop of our own")
    assert found["streams"]["tokens"] > 0
    assert found["streams"]["core_share"] > 0
    assert all(verdict["claim"] in done.stdout for verdict in found["verdicts"])
    assert ("nginx: not measured: not installed" in done.stdout) == bool(absent)


def test_wrk_that_is_not_there(tmp_path: Path) -> None:
    """Said, with what to do; nothing is measured by another loader in its place."""
    done = subprocess.run(
        [sys.executable, "-m", "kelvin.main", "bench", "front"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1
    assert "wrk is not installed: `make bench-tools`, or `--loader own`" in done.stderr
    assert list(tmp_path.iterdir()) == []
