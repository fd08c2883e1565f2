"""Results of benchmark rounds: a failed page-cache state costs one round, a failed system its results."""

import pytest

from coldstart_bench.harness.installation import InstallationFailed
from coldstart_bench.harness.machine_state import PageCacheNotReady
from coldstart_bench.harness.program_runner import ProgramFailed
from coldstart_bench.harness.result_collector import ResultCollector
from coldstart_bench.report.bench_report import Key, MissingFigure

KEY: Key = (500_000_000, "nvme", "kelvin")


class Answers:
    """A measurement that gives these values or errors in turn."""

    def __init__(self, *answers: float | Exception) -> None:
        self.answers = list(answers)

    def __call__(self) -> float:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def tally_of(*answers: float | Exception) -> tuple[ResultCollector[float], list[str], Answers]:
    """Collect these answers of one system, beside another system with a result in every round."""
    told: list[str] = []
    tally, measure = ResultCollector[float](told.append), Answers(*answers)
    for _ in answers:
        tally.measure(KEY, measure)
        tally.measure((1, "host", "other"), lambda: 1.0)
    assert len(tally.figures[1, "host", "other"]) == len(answers)
    return tally, told, measure


def test_a_round_without_its_state_is_skipped() -> None:
    """A skipped round is reported, and the other rounds count."""
    tally, told, _ = tally_of(0.1, PageCacheNotReady("9 pages are not"), 0.3)
    assert tally.figures[KEY] == [0.1, 0.3]
    assert told == ["kelvin, nvme: skipped: 9 pages are not"]
    assert tally.failures == ()


def test_state_missing_in_every_round_is_a_failure() -> None:
    """Without its state in any round, a system fails with the last reason."""
    tally, _, measure = tally_of(PageCacheNotReady("first"), PageCacheNotReady("last"))
    assert tally.failures == (MissingFigure("kelvin", "last", 500_000_000, "nvme"),)
    assert KEY not in tally.figures
    assert measure.answers == []


@pytest.mark.parametrize("error", [ProgramFailed("ended with -9"), InstallationFailed("500 broken")], ids=str)
def test_failed_system_is_not_measured_again(error: Exception) -> None:
    """A failed system is not measured again and loses earlier results, which would flatter it."""
    tally, told, measure = tally_of(0.1, error, 0.2)
    assert tally.failures == (MissingFigure("kelvin", str(error), 500_000_000, "nvme"),)
    assert KEY not in tally.figures
    assert measure.answers == [0.2]
    assert told == [f"kelvin, nvme: {error}"]


def test_unexpected_error_ends_the_bench() -> None:
    """An unexpected error is a defect of the benchmark."""
    with pytest.raises(ZeroDivisionError):
        tally_of(ZeroDivisionError())
