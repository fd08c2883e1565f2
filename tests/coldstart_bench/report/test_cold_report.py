"""Results of `kelvin bench cold` are compared with the floor of the same run, and each claim can fail."""

from collections.abc import Sequence

import pytest

from coldstart_bench.report.cold_report import (
    ColdFigures,
    MemoryFootprint,
    StageRow,
    cold_rows,
    judge_cold,
    stage_table,
    table,
    without_probe,
)

SIZE, SMALL, MIB = 500_000_000, 100_000_000, 1 << 20
STAGES = [StageRow(SIZE, "host", "leased", 0.01), StageRow(SIZE, "host", "bound", 0.02)]
FITS = MemoryFootprint(SIZE, SIZE, 512 << 20, 100 * MIB, 200 * MIB)


def passed(
    host: float = 1.3,
    nvme: float = 1.2,
    size: int = SIZE,
    stages: Sequence[StageRow] = STAGES,
    taken: MemoryFootprint = FITS,
) -> list[bool | None]:
    """Return whether the claims for host, NVMe, bind time and memory hold."""
    measured = {(size, tier, "floor"): [1.0] for tier in ("host", "nvme")}
    rows = cold_rows({**measured, (size, "host", "kelvin"): [host], (size, "nvme", "kelvin"): [nvme]})
    found = ColdFigures((size,), rows, tuple(stages), (taken,))
    return [verdict.passed for verdict in judge_cold(found)]


def test_good_figures_pass() -> None:
    assert passed() == [True, True, True, True]


@pytest.mark.parametrize(
    ("found", "want"),
    [
        pytest.param(passed(host=1.36), [False, True, True, True], id="slower than 1.35 of the floor from memory"),
        pytest.param(passed(nvme=1.26), [True, False, True, True], id="slower than 1.25 of the floor from NVMe"),
        pytest.param(
            passed(stages=[StageRow(SIZE, "host", "bound", 0.06)]), [True, True, False, True], id="bound too late"
        ),
        pytest.param(passed(stages=[]), [True, True, None, True], id="never bound"),
    ],
)
def test_a_bad_figure_fails(found: list[bool | None], want: list[bool | None]) -> None:
    assert found == want


def test_memory_beyond_the_model_fails() -> None:
    """Private memory may grow by 256 MiB beyond the model, including the spare room of its last slab."""
    assert passed(taken=MemoryFootprint(SIZE, SIZE, 512 << 20, 100 * MIB, 400 * MIB))[-1] is False


def test_a_small_model_is_not_held_to_the_floor() -> None:
    """For a small model the fixed cost of a start dominates. Its ratio is printed, not judged."""
    assert passed(size=SMALL, host=1.9)[:2] == [None, None]


def test_missing_figure_is_reported_as_not_measured() -> None:
    """Every claim of a requested size is listed, and none passes."""
    rows = cold_rows({(SIZE, "host", "kelvin"): [1.0], (SIZE, "nvme", "floor"): [1.0]})
    found = judge_cold(ColdFigures((SIZE,), rows))
    assert {(verdict.value, verdict.passed) for verdict in found} == {(None, None)}
    assert [verdict.state for verdict in found] == ["host", "nvme", "host", ""]


def test_our_row_without_its_probe_is_less_by_its_share() -> None:
    """Without the probe, median, interval and ratio are smaller, and other rows are unchanged."""
    rows = cold_rows({(SIZE, "host", "floor"): [0.1], (SIZE, "host", "kelvin"): [0.15]})
    found = {row.system: row for row in without_probe(rows, {SIZE: 0.02})}
    assert found["kelvin without its probe"].median_s == pytest.approx(0.13)
    assert found["kelvin without its probe"].ratio_to_floor == pytest.approx(1.3)
    assert (found["kelvin"], found["floor"]) == tuple(sorted(rows, key=lambda row: -row.median_s))


def test_a_row_is_a_ratio_to_the_floor_of_its_size_and_tier() -> None:
    rows = cold_rows({(5, "host", "floor"): [1.0, 1.0, 1.0], (5, "host", "kelvin"): [1.4, 1.5, 1.6]})
    assert [(row.system, row.ratio_to_floor) for row in rows] == [("floor", 1.0), ("kelvin", 1.5)]
    assert "1.50x" in table(rows)


def test_a_row_without_its_floor_has_no_ratio() -> None:
    """A ratio to another tier's floor is never printed."""
    rows = cold_rows({(5, "nvme", "kelvin"): [1.0], (5, "host", "floor"): [1.0]})
    assert {row.system: row.ratio_to_floor for row in rows} == {"kelvin": None, "floor": 1.0}
    assert [line.split()[-1] for line in table(rows).splitlines()[1:]] == ["1.00x", "1"]
    assert {row.ratio_to_floor for row in without_probe(rows, {5: 0.25}) if row.system != "floor"} == {None}


def test_stages_stand_beside_the_floor_of_their_size_and_tier() -> None:
    """Stages are in milliseconds and relative to the tier's floor. Stages after the first token are left out."""
    rows = cold_rows({(5, tier, "floor"): [0.1] for tier in ("host", "nvme")})
    stages = [StageRow(5, "host", "ready", 0.02), StageRow(5, "nvme", "ready", 0.05), StageRow(5, "host", "done", 9.0)]
    stages.append(StageRow(5, "nvme", "leased", 0.03))
    _, ready, leased = (line.split() for line in stage_table(stages, rows).splitlines())
    assert ready == ["ready", "20.0ms", "0.200x", "50.0ms", "0.500x"]
    assert leased == ["leased", "30.0ms", "0.300x"]
