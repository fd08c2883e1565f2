"""Figures of a run, and gaps: a state that can't be made costs a round, a failure the system, and nothing else."""

import pytest

from coldstart_bench.harness.installation import InstallationFailed
from coldstart_bench.harness.machine_state import PageCacheNotReady
from coldstart_bench.harness.program_runner import ProgramFailed
from coldstart_bench.harness.result_collector import ResultCollector
from coldstart_bench.report.bench_report import Key, MissingFigure

KEY: Key = (500_000_000, "nvme", "kelvin")


class Answers:
    """One for each time that it is measured."""

    def __init__(self, *answers: float | Exception) -> None:
        self.answers = list(answers)

    def __call__(self) -> float:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def tally_of(*answers: float | Exception) -> tuple[ResultCollector[float], list[str], Answers]:
    """Of a system with these, from one state; another one has a figure in each round."""
    told: list[str] = []
    tally, measure = ResultCollector[float](told.append), Answers(*answers)
    for _ in answers:
        tally.take(KEY, measure)
        tally.take((1, "host", "other"), lambda: 1.0)
    assert len(tally.figures[1, "host", "other"]) == len(answers)
    return tally, told, measure


def test_a_round_without_its_state_is_skipped() -> None:
    """It is told; the other rounds' figures stand, and nothing has failed."""
    tally, told, _ = tally_of(0.1, PageCacheNotReady("9 pages are not"), 0.3)
    assert tally.figures[KEY] == [0.1, 0.3]
    assert told == ["kelvin, nvme: skipped: 9 pages are not"]
    assert tally.failures == ()


def test_without_a_state_in_every_round_it_is_a_failure_by_name() -> None:
    """The last reason counts, and it was tried each time."""
    tally, _, measure = tally_of(PageCacheNotReady("first"), PageCacheNotReady("last"))
    assert tally.failures == (MissingFigure("kelvin", "last", 500_000_000, "nvme"),)
    assert KEY not in tally.figures
    assert measure.answers == []


@pytest.mark.parametrize("error", [ProgramFailed("ended with -9"), InstallationFailed("500 broken")], ids=str)
def test_who_fails_once_is_not_asked_again_and_has_no_figure(error: Exception) -> None:
    """What it gave before included: a median over the rounds that worked would flatter it."""
    tally, told, measure = tally_of(0.1, error, 0.2)
    assert tally.failures == (MissingFigure("kelvin", str(error), 500_000_000, "nvme"),)
    assert KEY not in tally.figures
    assert measure.answers == [0.2]
    assert told == [f"kelvin, nvme: {error}"]


def test_unexpected_error_ends_the_bench() -> None:
    """A defect of the bench ends it."""
    with pytest.raises(ZeroDivisionError):
        tally_of(ZeroDivisionError())
