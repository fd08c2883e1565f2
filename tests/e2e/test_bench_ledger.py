"""`kelvin bench ledger`: what is put in is what is billed, verified and reconciled, in bounded time and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.deep

FEW, MANY = 20_000, 300_000  # less than this many have hardly more lifetimes than the few
REPORT_S = 3.0  # what ten million may take


def measure(scratch: Path, requests: int) -> Any:
    """The report of a run, which leaves nothing."""
    place = scratch / str(requests)
    place.mkdir()
    words = ["bench", "ledger", "--requests", str(requests), "--json", str(scratch / f"{requests}.json")]
    done = subprocess.run(
        [sys.executable, "-m", "kelvin.main", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(place)},
    )
    assert done.returncode == 0, done.stderr
    assert list(place.glob("kelvin-*")) == []
    assert f"{requests:,}" in done.stdout
    return json.loads((scratch / f"{requests}.json").read_text())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_time_and_memory_do_not_grow_with_the_requests(tmp_path: Path) -> None:
    """Fifteen times the requests: the report is as quick, and no process needs more memory than for the few.

    The command itself checks that the bill is the generator's own count, and that verify and reconcile find nothing.
    """
    few, many = measure(tmp_path, FEW), measure(tmp_path, MANY)
    assert many["lifetimes"] > 3 * few["lifetimes"]
    assert many["report_s"] < REPORT_S
    # Fifteen times the work would be fifteen times the time; a report of a few milliseconds is mostly its call.
    assert many["report_s"] < 5 * few["report_s"] + 0.05
    for figure in ("verify_bytes", "reconcile_bytes"):
        assert 0 < many[figure] < few[figure] + (24 << 20), figure
    assert many["controlplane_after_bytes"] < many["controlplane_before_bytes"] + (24 << 20)
