"""Every report has claims that can fail, named gaps, one JSON object and one exit code."""

import json

import pytest

from coldstart_bench.report.bench_report import (
    BenchReport,
    ClaimVerdict,
    Figures,
    MissingFigure,
    align,
    at_least,
    at_most,
    cell,
    failure_line,
    ratio_or_none,
    recorded_once,
    verdict_line,
)

SIZE = 2_000_000_000


class Speed(Figures, frozen=True):
    rate: float


def report(*verdicts: ClaimVerdict, failures: tuple[MissingFigure, ...] = ()) -> BenchReport[Speed]:
    """A report with one result."""
    return BenchReport(Speed(3.0, failures=failures, notes=("on a train",)), verdicts, {"cores": 2}, 0.5, "abc")


@pytest.mark.parametrize(
    ("verdict", "passed"),
    [
        pytest.param(at_most("x", 1.0, 1.0), True, id="at most: the limit is good enough"),
        pytest.param(at_most("x", 1.1, 1.0), False, id="at most: more is not"),
        pytest.param(at_least("x", 1.0, 1.0), True, id="at least: the limit is good enough"),
        pytest.param(at_least("x", 0.9, 1.0), False, id="at least: less is not"),
        pytest.param(at_most("x", None, 1.0), None, id="what was not measured does not pass"),
        pytest.param(at_most("x", 1.1, 1.0, is_checked=False), None, id="nor does what is not asked of this size"),
    ],
)
def test_claim_is_checked_against_its_limit(verdict: ClaimVerdict, passed: bool | None) -> None:
    assert verdict.passed is passed


@pytest.mark.parametrize(
    ("unrecorded", "values", "passed"),
    [(0, [0, 0], [True, True]), (2, [2, 0], [False, True]), (-2, [0, 2], [True, False])],
)
def test_each_answer_is_recorded_once(unrecorded: int, values: list[float], passed: list[bool]) -> None:
    """A missing record and a surplus record fail different claims."""
    found = recorded_once(unrecorded, "all")
    assert ([each.value for each in found], [each.passed for each in found]) == (values, passed)


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        pytest.param(report(at_most("x", 1.0, 1.0)), True, id="all holds"),
        pytest.param(report(at_most("x", 1.1, 1.0)), False, id="a claim does not hold"),
        pytest.param(report(at_most("x", 1.1, 1.0, decides=False)), True, id="one that is only printed does not hold"),
        pytest.param(report(at_most("x", None, 1.0)), True, id="one was not measured"),
        pytest.param(
            report(failures=(MissingFigure("mmap", "it ended", SIZE),)), False, id="what was asked for has no figure"
        ),
        pytest.param(report(failures=(MissingFigure("mmap", "not installed"),)), True, id="a loader is not installed"),
    ],
)
def test_exit_code_needs_every_figure_and_claim(found: BenchReport[Speed], passed: bool) -> None:
    """The run passes if everything requested was measured and every deciding claim holds."""
    assert found.passed is passed
    assert json.loads(found.json())["passed"] is passed


def test_report_json_is_one_object() -> None:
    """The results are fields beside those that every report has."""
    found = json.loads(report(at_most("x", 1.0, 1.0)).json())
    assert (found["rate"], found["machine"], found["load_before"], found["commit"]) == (3.0, {"cores": 2}, 0.5, "abc")
    assert (found["notes"], found["failures"]) == (["on a train"], [])
    assert [(each["claim"], each["passed"]) for each in found["verdicts"]] == [("x", True)]


def test_report_text_has_every_section() -> None:
    """The text has the table, missing results, claims, the machine and notes, in this order."""
    text = (
        report(at_most("x", 1.0, 1.0), failures=(MissingFigure("mmap", "not installed"),))
        .text("the table")
        .splitlines()
    )
    assert text[:2] == ["the table", "mmap: not measured: not installed"]
    assert text[2].startswith("pass")
    assert text[3:] == ["machine: {'cores': 2}  load before: 0.50  commit: abc", "note: on a train"]


def test_a_line_says_figure_and_rule() -> None:
    """A line has the size if there is one, the value and the rule."""
    assert (
        verdict_line(at_least("x to y", 0.931, 0.9, "cold", SIZE))
        == "pass   2.00 GB  cold  x to y: 0.931 (at least 0.9)"
    )
    assert verdict_line(at_least("x to y", 0.831, 0.9, "200")) == "FAIL  200   x to y: 0.831 (at least 0.9)"
    assert "not measured (at most 0.9)" in verdict_line(at_most("x to y", None, 0.9))


def test_a_failure_says_where() -> None:
    """A failure names its size and state, as far as known."""
    assert failure_line(MissingFigure("mmap", "it ended", SIZE, "cold")) == "mmap at 2.00 GB, cold: it ended"
    assert failure_line(MissingFigure("the rounds", "refused", SIZE)) == "the rounds at 2.00 GB: refused"


def test_unmeasured_cell_is_never_zero() -> None:
    """A cell without a measurement is "-" or the given text."""
    assert (cell(0.5, "{:.1f}ms", times=1e3), cell(None, "{:.1f}ms"), cell(None, "{}", none="")) == (
        "500.0ms",
        "-",
        "",
    )
    assert (ratio_or_none(1.0, 2.0), ratio_or_none(None, 2.0), ratio_or_none(1.0, None)) == (0.5, None, None)


def test_columns_are_aligned() -> None:
    """Names are aligned left, figures right."""
    assert align([("who", "ms"), ("a", "1"), ("bcde", "100")]) == ["who    ms", "a       1", "bcde  100"]
