"""Plots of a report: one file each, with every visible stage. Without matplotlib the remedy is printed."""

from pathlib import Path

import pytest

from coldstart_bench.report import plots
from coldstart_bench.report.cold_report import ColdFigures, StageRow, cold_rows
from coldstart_bench.report.load_report import LoadFigures, LoadTiming, rows_of

SIZE = 500_000_000


def stages(tier: str) -> list[StageRow]:
    """Stages with a short one, and one after the first token."""
    names = (("routed", 0.0001), ("leased", 0.05), ("prefilled", 0.04), ("first_token", 0.01), ("done", 0.5))
    return [StageRow(SIZE, tier, name, seconds) for name, seconds in names]


def test_stages_that_can_be_seen_are_bars() -> None:
    """Stages too short to see are summed as "others". Stages after the first token are left out."""
    bars = plots.stage_bars(stages("host"))
    assert [name for name, _ in bars] == ["leased", "prefilled", "first_token", "others"]
    assert sum(length for _, length in bars) == pytest.approx(100.1)


@pytest.mark.deep
def test_the_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = {(SIZE, tier, system): [0.1] for tier in ("host", "nvme") for system in ("floor", "kelvin")}
    measured[SIZE, "store", "kelvin"] = [0.2]  # its floor has no result
    cold = ColdFigures((SIZE,), cold_rows(measured), (*stages("host"), *stages("nvme")))
    takes = {(SIZE, "cold", name): [LoadTiming(0.1, 0.1)] for name in ("kelvin", "mmap")}
    load = LoadFigures(rows_of(takes, {(SIZE, "cold", "floor: x"): [0.1]}), "cpu")
    drawn = [*plots.draw_cold(cold, tmp_path / "new"), *plots.draw_load(load, tmp_path / "new")]
    assert [path.name for path in drawn] == ["cold-stages.png", "cold-ratios.png", "load-500mb.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert all(path.is_file() for path in plots.draw_cold(ColdFigures((), ()), tmp_path / "nothing was measured"))
