"""A small `kelvin bench front` with the loader that needs no installation."""

from pathlib import Path

import pytest

from tests.e2e import bench_command

pytestmark = pytest.mark.deep


@pytest.mark.timeout(300)
def test_a_small_front(tmp_path: Path) -> None:
    """Every installed system has rows, every Kelvin answer has its record, and no files are left."""
    words = ["--loader", "own", "--rounds", "1", "--seconds", "1", "--connections", "1,4", "--no-peers"]
    found, said = bench_command.run_passing(tmp_path, "front", *words)
    assert list((tmp_path / "scratch").iterdir()) == []
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
    assert (found["unrecorded"], found["loader"]) == (0, "the bench's own loop")
    assert found["streams"]["tokens"] > 0
    assert found["streams"]["core_share"] > 0
    assert ("nginx: not measured: not installed" in said) == bool(absent)


def test_wrk_that_is_not_there(tmp_path: Path) -> None:
    """A missing wrk is reported with the remedy, and no other loader replaces it."""
    nowhere = str(tmp_path)
    done = bench_command.run("front", PATH=nowhere, XDG_CACHE_HOME=nowhere, TMPDIR=nowhere)
    assert done.returncode == 1
    assert "wrk is not installed: `make bench-tools`, or `--loader own`" in done.stderr
    assert list(tmp_path.iterdir()) == []
