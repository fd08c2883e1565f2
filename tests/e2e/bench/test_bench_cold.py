"""`kelvin bench cold` measures every system from every tier and leaves nothing behind."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e import bench_command

pytestmark = pytest.mark.deep

OURS = {"kelvin", "kelvin without its probe", "floor"}
SYSTEMS = {*OURS, "from_pretrained", "resident transformers"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_small_run(tmp_path: Path) -> None:
    """One round of one size has a row per system and tier, with its ratio to the tier's floor."""
    found, said = bench_command.run_passing(tmp_path, "cold", "--sizes", "0.05", "--repeats", "1")
    scratch = tmp_path / "scratch"
    wanted = {(tier, system) for tier in ("host", "nvme") for system in SYSTEMS}
    wanted |= {("store", system) for system in OURS}
    assert {(row["tier"], row["system"]) for row in found["rows"]} == wanted
    assert all(row["n"] == 1 and row["low_s"] == row["median_s"] == row["high_s"] > 0 for row in found["rows"])
    floors = {row["tier"]: row["median_s"] for row in found["rows"] if row["system"] == "floor"}
    for row in found["rows"]:
        assert row["ratio_to_floor"] == pytest.approx(row["median_s"] / floors[row["tier"]])
    assert {"leased", "bound", "ready", "prefilled", "first_token"} <= {stage["stage"] for stage in found["stages"]}
    (footprint,) = found["footprints"]
    assert footprint["slabs_bytes"] >= footprint["model_bytes"] > 0
    assert footprint["peak_bytes"] >= footprint["parked_bytes"] > 0
    assert {verdict["claim"] for verdict in found["verdicts"]} == {
        "first token to the floor's, known answers included",
        "seconds from the request to bound",
        "MiB that a start takes beside the model's bytes",
    }
    assert "/ floor" in said
    assert not [words for words in _commands() if any(str(scratch) in word for word in words)]


def _commands() -> Iterator[list[str]]:
    """Yield the command line of every process on this machine."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # the process ended meanwhile
            yield process.cmdline()
