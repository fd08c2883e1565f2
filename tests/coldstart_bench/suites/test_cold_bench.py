"""`kelvin bench cold` goes on if a page-cache state can't be made or a size fails, and reports it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from coldstart_bench.harness.installation import InstallationFailed
from coldstart_bench.harness.machine_state import PageCacheNotReady
from coldstart_bench.harness.result_collector import ResultCollector
from coldstart_bench.report.cold_report import FLOOR, KELVIN, UNPROBED, ColdFigures, MemoryFootprint, judge_cold
from coldstart_bench.suites import cold_bench
from coldstart_bench.suites.cold_bench import STEP_WITH, STEP_WITHOUT, ColdCase, measure_round

SIZE = 500_000_000
SECONDS = {KELVIN: 0.12, FLOOR: 0.1, STEP_WITH: 0.05, STEP_WITHOUT: 0.04}
ALL = (
    *((tier, who) for tier in ("host", "nvme") for who in (KELVIN, FLOOR)),
    ("host", STEP_WITH),
    ("host", STEP_WITHOUT),
)


def thief(tier: str, system: str, rounds: int) -> Callable[[], None]:
    """Return a preparation that fails in its first rounds for the NVMe floor, as if the kernel had dropped pages."""
    left = [rounds if (tier, system) == ("nvme", FLOOR) else 0]

    def prepare() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise PageCacheNotReady("model.safetensors: 7 pages are not in the page cache")

    return prepare


def seen_after(rounds: int, stolen: int) -> cold_bench.ColdResults:
    """Measure some rounds, and lose the NVMe floor's state in the first of them."""
    seen = cold_bench.ColdResults(ResultCollector(lambda line: None))
    cases = [ColdCase(tier, who, thief(tier, who, stolen), lambda who=who: SECONDS[who]) for tier, who in ALL]  # type: ignore[misc]
    for _ in range(rounds):
        measure_round(seen.tally, SIZE, cases)
    seen.footprints.append(MemoryFootprint(SIZE, SIZE, SIZE, 0, 0))
    return seen


def test_lost_page_cache_state_costs_one_round() -> None:
    """The other systems have every round and every ratio, with and without the probe."""
    report = seen_after(rounds=3, stolen=2).figures([SIZE])
    assert {(row.tier, row.system): row.n for row in report.rows if row.system != UNPROBED} == {
        **{(tier, who): 3 for tier, who in ALL if not who.startswith("first step")},
        ("nvme", FLOOR): 1,
    }
    assert report.failures == ()
    ratios = {row.system: row.ratio_to_floor for row in report.rows if row.tier == "nvme"}
    assert ratios == pytest.approx({KELVIN: 1.2, UNPROBED: 1.1, FLOOR: 1.0})
    assert [verdict.passed for verdict in judge_cold(report)] == [True, True, None, True]


def test_page_cache_state_lost_every_round_is_a_failure() -> None:
    """Kelvin's row has no ratio then, and its claim does not pass."""
    report = seen_after(rounds=2, stolen=2).figures([SIZE])
    (failed,) = report.failures
    assert (failed.system, failed.size_bytes, failed.state) == (FLOOR, SIZE, "nvme")
    assert {row.ratio_to_floor for row in report.rows if row.tier == "nvme"} == {None}
    assert [(verdict.state, verdict.passed) for verdict in judge_cold(report)][:2] == [("host", True), ("nvme", None)]


def test_a_size_that_fails_is_named_and_the_next_one_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Partial results are reported after each size."""
    monkeypatch.setattr(cold_bench, "running_installation", lambda *given, **settings: _up())
    monkeypatch.setattr(cold_bench, "_measure_size", _second_only)
    known: list[ColdFigures] = []
    plan = cold_bench.ColdPlan([SIZE, 2 * SIZE], 1, tell=lambda line: None, known=known.append)
    report = cold_bench.run(plan, tmp_path)
    assert [(failed.system, failed.size_bytes) for failed in report.failures] == [("the rounds", SIZE)]
    assert [(so_far.sizes_bytes, len(so_far.rows)) for so_far in known] == [((SIZE,), 0), ((SIZE, 2 * SIZE), 1)]
    assert {verdict.size_bytes for verdict in judge_cold(known[0])} == {SIZE}
    assert list(tmp_path.iterdir()) == []


class _up:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def _second_only(
    plan: cold_bench.ColdPlan, kelvin: object, directory: Path, size_bytes: int, seen: cold_bench.ColdResults
) -> None:
    if size_bytes == SIZE:
        raise InstallationFailed("push: refused")
    seen.tally.measure((size_bytes, "host", FLOOR), lambda: 0.1)


@pytest.mark.parametrize(("stolen", "status"), [(0, 0), (1, 0), (2, 1)], ids=["never", "once", "in every round"])
def test_the_exit_says_whether_all_has_a_figure(tmp_path: Path, stolen: int, status: int) -> None:
    """Rows, reasons and the report are written in each case."""

    def run(plan: cold_bench.ColdPlan, scratch: Path) -> ColdFigures:
        return seen_after(rounds=2, stolen=stolen).figures(plan.sizes_bytes)

    file = tmp_path / "report.json"
    done = CliRunner().invoke(replace(cold_bench.BENCH, run=run).command(), ["--sizes", "0.5", "--json", str(file)])
    assert done.exit_code == status, done.output
    assert ("floor at 0.50 GB, nvme: model.safetensors: 7 pages" in done.output) is (status == 1)
    assert ("not measured (at most 1.25)" in done.output) is (status == 1)
    assert done.output.count("kelvin without its probe") == 2 + 1  # one row per tier, and the note
    assert len(json.loads(file.read_text())["failures"]) == status
