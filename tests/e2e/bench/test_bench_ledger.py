"""`kelvin bench ledger`: generated usage is billed, verified and reconciled in bounded time and memory."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import bench_command

pytestmark = pytest.mark.deep

FEW, MANY = 20_000, 300_000  # with fewer, the many would hardly have more lifetimes than the few
REPORT_S = 3.0  # the limit for ten million requests


def measure(scratch: Path, requests: int) -> Any:
    """Return the report of a run that leaves no files."""
    found, said = bench_command.run_passing(scratch, "ledger", "--requests", str(requests))
    assert f"{requests:,}" in said
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_time_and_memory_do_not_grow_with_the_requests(tmp_path: Path) -> None:
    """With fifteen times the requests, the report is about as fast and no process needs more memory.

    The command itself checks the bill against the generator's count, and that verify and reconcile find nothing.
    """
    few, many = measure(tmp_path, FEW), measure(tmp_path, MANY)
    assert many["lifetimes"] > 3 * few["lifetimes"]
    assert many["report_s"] < REPORT_S
    # Linear time would be fifteen times as long. A report of a few milliseconds is mostly the call itself.
    assert many["report_s"] < 5 * few["report_s"] + 0.05
    for figure in ("verify_bytes", "reconcile_bytes"):
        assert 0 < many[figure] < few[figure] + (24 << 20), figure
    assert many["controlplane_after_bytes"] < many["controlplane_before_bytes"] + (24 << 20)
