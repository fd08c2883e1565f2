"""The benches of the front door under load from outside, tiny: what was right is asserted, no time of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

RIGHT = ("requests that were not answered right", "answers without a usage record")


def bench(tmp_path: Path, *words: str) -> Any:
    """The report of a run that leaves nothing, whose exit code is what its lines say."""
    scratch, report = tmp_path / "scratch", tmp_path / "report.json"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "kelvin.main", "bench", *words, "--json", str(report)],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    assert list(scratch.iterdir()) == []
    found = json.loads(report.read_text())
    assert all(verdict["claim"] in done.stdout for verdict in found["verdicts"])
    red = [verdict["claim"] for verdict in found["verdicts"] if verdict["passed"] is False]
    assert done.returncode == (1 if red else 0), done.stdout + done.stderr
    assert not [claim for claim in red if claim in RIGHT], done.stdout
    assert found["machine"]["cores"] >= 1
    return found


def test_a_small_flood(tmp_path: Path) -> None:
    """Both tenants' requests are answered, recorded as theirs, and no slot is used twice at once."""
    found = bench(tmp_path, "flood", "--requests", "50", "--slots", "4", "--slot-ms", "50")
    assert (found["loud"]["asked"], found["loud"]["right"]) == (50, 50)
    assert found["quiet"]["asked"] == found["quiet"]["right"] > 3
    assert (found["unrecorded"], found["most_inside"]) == (0, 4)
    assert found["loud"]["queued_p95_s"] > 0
    assert found["memory"]["peak_pss"] >= found["memory"]["before_pss"] > 0
