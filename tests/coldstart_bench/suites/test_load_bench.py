"""`kelvin bench load` with fake loaders, right and wrong, and the choice of real ones."""

from pathlib import Path
from typing import Any, cast

import pytest

from coldstart_bench.harness.program_runner import Program, ProgramFailed
from coldstart_bench.report.load_report import ALL, KELVIN, PEERS, Contender, choose_contenders
from coldstart_bench.suites.load_bench import LoadPlan, _LoadFixture, _LoadRun, _take

MMAP = next(contender for contender in PEERS if contender.name == "mmap")
RIGHT = {"load_s": 0.1, "consume_s": 0.2, "checksum": 7, "bytes": 4096}


class Lying:
    """A fake program that gives one answer, or fails."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    def call(self, **arguments: object) -> Any:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def taken(tmp_path: Path, answer: Any, times: int = 2) -> tuple[_LoadRun, Lying]:
    """Load a file several times with a fake program. Return the run and the program."""
    (tmp_path / "weights").write_bytes(bytes(8192))
    told: list[str] = []
    run, program = _LoadRun(LoadPlan((4096,), times, (MMAP,), "cpu", tell=told.append)), Lying(answer)
    ground = _LoadFixture(None, 4096, {"safetensors": tmp_path / "weights"}, 7, {"mmap": cast(Program, program)})
    for _ in range(times):
        _take(run, ground, MMAP, "hot")
    assert bool(told) is bool(run.takes.failures), "a failure is told at once"
    return run, program


def test_correct_load_is_recorded(tmp_path: Path) -> None:
    run, _ = taken(tmp_path, RIGHT)
    assert [take.total_s for take in run.takes.figures[4096, "hot", "mmap"]] == pytest.approx([0.3, 0.3])
    assert run.takes.failures == ()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param({**RIGHT, "checksum": 8}, "WRONG BYTES", id="another sum"),
        pytest.param(ProgramFailed("the process of the load ended with -11"), "ended with -11", id="a crash"),
    ],
)
def test_failed_loader_is_reported_and_not_used_again(tmp_path: Path, answer: Any, said: str) -> None:
    """A loader with wrong bytes or a crash has no results."""
    run, program = taken(tmp_path, answer, times=3)
    (failed,) = run.takes.failures
    assert (failed.size_bytes, failed.state, failed.system) == (4096, "hot", "mmap")
    assert said in failed.reason
    assert program.asked == 1
    assert run.takes.figures == {}


def test_only_known_loaders_are_chosen() -> None:
    """All loaders are the default. The error lists the known ones."""
    assert choose_contenders([]) == ALL
    assert choose_contenders(["mmap", "kelvin"]) == (KELVIN, MMAP)
    with pytest.raises(ValueError, match="fastest: must be of kelvin, tensorizer"):
        choose_contenders(["fastest"])


def test_missing_package_is_known_before_the_start() -> None:
    """A loader is installed if its package is."""
    assert not Contender("x", "x", "no_such_package_of_anyone", False, "safetensors").installed
    assert KELVIN.installed
