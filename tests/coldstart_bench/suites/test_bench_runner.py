"""The frame of all benchmarks: options become a plan, a run becomes a report and an exit code."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from coldstart_bench.__main__ import BENCHES
from coldstart_bench.report import plots
from coldstart_bench.report.bench_report import BenchFailed, ClaimVerdict, Figures, at_most
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.cli.operations.bench_commands import bench_command, drill_command


class Count(Figures, frozen=True):
    count: int


@dataclass(frozen=True, slots=True)
class Counting(BenchPlan):
    count: int
    lasts_s: float


def run(plan: Counting, scratch: Path) -> Count:
    assert list(scratch.iterdir()) == []
    plan.tell(f"counting for {plan.lasts_s:g} s")
    return Count(plan.count, notes=(str(scratch),))


def claims(found: Count) -> tuple[ClaimVerdict, ...]:
    """The count must be at most 3."""
    return (at_most("how many", found.count, 3),)


def half(value: int) -> float:
    """Return half of an even number. Raises ValueError for an odd one."""
    if value % 2:
        raise ValueError(f"{value}: must be even")
    return value / 2


BENCH = Bench(
    "count",
    "Count.",
    (
        option("--count", 3, click.IntRange(1, 9), "So many."),
        option("--pairs", 4, int, "Twice.", "lasts_s", convert=half),
    ),
    Counting,
    run,
    lambda found: f"{found.count} found",
    claims,
)


def invoked(*words: str, bench: Bench[Counting, Count] = BENCH) -> Result:
    """Run the benchmark's command."""
    return CliRunner().invoke(bench.command(), words)


def test_passing_bench_exits_with_0(tmp_path: Path) -> None:
    """Steps, table, claims and notes are printed, the report is written, and no file is left."""
    done = invoked("--json", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    assert "counting for 2 s" in done.output
    assert done.output.index("3 found") < done.output.index("pass") < done.output.index("note: ")
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["count"], found["passed"]) == (3, True)
    assert found["machine"]["cores"] >= 1
    assert not Path(found["notes"][0]).exists()


def test_failed_claim_exits_with_1(tmp_path: Path) -> None:
    """Negative control: the failed claim is printed, and the report is still written."""
    done = invoked("--count", "4", "--json", str(tmp_path / "report.json"))
    assert done.exit_code == 1
    assert "FAIL" in done.output
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is False


@pytest.mark.parametrize(
    "words",
    [pytest.param(["--count", "10"], id="out of bounds"), pytest.param(["--pairs", "3"], id="what can't be kept")],
)
def test_bad_option_is_refused_before_measuring(words: list[str]) -> None:
    """The error names option and value."""
    done = invoked(*words)
    assert done.exit_code == 2
    assert words[0] in done.output
    assert words[1] in done.output
    assert "counting" not in done.output


def test_a_report_that_can_not_be_written_is_wrong_usage(tmp_path: Path) -> None:
    """The file is checked before the run, which may take an hour."""
    done = invoked("--json", str(tmp_path / "none" / "report.json"))
    assert (done.exit_code, "counting" in done.output) == (2, False)
    assert "--json" in done.output
    assert "none/report.json: must be in a directory" in "".join(done.output.replace("│", "").split("\n"))


def test_report_that_finds_no_room_is_printed_all_the_same() -> None:
    """Results of a long run are not lost if the file can't be written."""
    done = invoked("--json", "/dev/full")
    assert "3 found" in done.output
    assert isinstance(done.exception, OSError)


def failing(plan: Counting, scratch: Path) -> Count:
    """Report partial results, then fail."""
    plan.known(Count(1))
    raise BenchFailed("it ended")


def test_failed_run_prints_partial_figures(tmp_path: Path) -> None:
    """A failed run prints its reason and reports its partial results."""
    done = invoked("--json", str(tmp_path / "report.json"), bench=replace(BENCH, run=failing))
    assert (done.exit_code, "it ended" in done.output) == (1, True)
    assert json.loads((tmp_path / "report.json").read_text())["count"] == 1


def test_plan_without_room_is_refused() -> None:
    refusal: Callable[[Counting, int, int], str] = lambda plan, disk, memory: f"{min(disk, memory) > 0}: too many"  # noqa: E731
    done = invoked(bench=replace(BENCH, refusal=refusal))
    assert (done.exit_code, "True: too many" in done.output, "counting" in done.output) == (1, True, False)


def test_only_what_can_be_drawn_has_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--plots` exists only for a benchmark that can draw."""
    monkeypatch.setattr(plots, "check", lambda: None)
    drawn: list[tuple[int, Path]] = []
    bench = replace(BENCH, draw=lambda found, directory: drawn.append((found.count, directory)))
    assert invoked("--plots", str(tmp_path), bench=bench).exit_code == 0
    assert drawn == [(3, tmp_path)]
    assert invoked("--plots", str(tmp_path)).exit_code == 2


def test_missing_matplotlib_is_named_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoked("--plots", str(tmp_path), bench=replace(BENCH, draw=lambda found, directory: None))
    assert (done.exit_code, "extra 'bench'" in done.output, "counting" in done.output) == (1, True, False)


class Planned(Exception):
    pass


def planned(plan: BenchPlan, scratch: Path) -> Figures:
    raise Planned(plan)


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_every_bench_has_a_plan_by_its_defaults(bench: Bench[BenchPlan, Figures], tmp_path: Path) -> None:
    """Every option has a default and a field in the plan, and `--help` works."""
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-11-16 18:17:03,5,1\n2026-11-16 18:17:04,5,1\n")
    words = [str(file)] if bench.name == "trace" else []
    roomy = replace(bench, run=planned, refusal=lambda plan, disk, memory: None)
    assert isinstance(CliRunner().invoke(roomy.command(), words).exception, Planned)
    shown = CliRunner().invoke(bench.command(), ["--help"])
    assert (shown.exit_code, "--json" in shown.output) == (0, True)


def test_the_command_line_has_every_bench() -> None:
    """The command line lists the benchmarks itself, without importing them."""
    assert {*bench_command.commands, *drill_command.commands} == {bench.name for bench in BENCHES}
