"""A benchmark that does not fit the machine is refused before it starts, with the size that would fit."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from coldstart_bench.__main__ import main
from coldstart_bench.harness.capacity_check import ResourceNeed, parse_sizes, refusal
from coldstart_bench.suites import floor_bench, integrity_bench
from coldstart_bench.suites.bench_runner import with_sizes

GB = 10**9
NEED = ResourceNeed(disk_times=5.0, memory_times=3.0, disk_bytes=GB, memory_bytes=4 * GB)


def test_sizes_are_parsed_in_order() -> None:
    """Sizes are sorted and unique. `--large` adds the sizes up to 16 GB."""
    assert parse_sizes("0.5,0.1,0.5") == [100_000_000, 500_000_000]
    assert with_sizes(lambda sizes: sizes)([2 * GB, 16 * GB], large=True) == [2 * GB, 4 * GB, 8 * GB, 16 * GB]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param("big", "big: must be numbers of GB", id="a word"),
        pytest.param("1,", "1,: must be numbers of GB", id="nothing behind a comma"),
        pytest.param("0.01", "0.01: each must be 0.05 to 22", id="too small"),
        pytest.param("0.1,64", "0.1,64: each must be 0.05 to 22", id="more than a model that is made can have"),
        pytest.param("nan", "nan: must be", id="not a number"),
        pytest.param("1e300", "1e300: must be", id="more bytes than a number has"),
    ],
)
def test_bad_sizes_are_refused(words: str, said: str) -> None:
    """The error has the value and the rule."""
    with pytest.raises(ValueError, match=said):
        parse_sizes(words)


def test_missing_capacity_is_named() -> None:
    """The largest size decides. The refusal names what is short, and the size that fits."""
    assert refusal([GB, 2 * GB], NEED, 11 * GB, 10 * GB) is None
    assert refusal([16 * GB], NEED, 74 * GB, 20 * GB) == (
        "16 GB: this takes 81 GB of disk below $TMPDIR (74 GB are free) and 52 GB of memory (20 GB are free); "
        "at most 5.3 GB can be measured here"
    )
    assert refusal([2 * GB], NEED, 100 * GB, GB) == (
        "2 GB: this takes 10 GB of memory (1 GB are free); at most 0 GB can be measured here"
    )


@pytest.mark.parametrize("bench", ["load", "cold"])
def test_a_run_that_does_not_fit_is_refused(bench: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without free memory the run is refused, and bad sizes are a usage error."""
    monkeypatch.setattr("coldstart_bench.suites.bench_runner.free_memory_bytes", lambda: 0)
    refused = CliRunner().invoke(main, [bench, "--sizes", "0.1"])
    assert (refused.exit_code, "GB can be measured here" in refused.output) == (1, True)
    wrong = CliRunner().invoke(main, [bench, "--sizes", "big"])
    assert (wrong.exit_code, "big: must be numbers of GB" in wrong.output) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            "storm --models 200 --model-mib 1024 --agents 64",
            "this takes 13961 GB of disk below $TMPDIR",
            id="200 models of a gigabyte at 64 agents",
        ),
        pytest.param(
            "overload --times 1,100 --slots 1024 --slot-ms 1 --seconds 3600",
            "this takes 368640 GB of memory",
            id="a hundred million requests a second for an hour",
        ),
    ],
)
def test_a_load_that_does_not_fit_is_refused(words: str, said: str) -> None:
    refused = CliRunner().invoke(main, words.split())
    assert (refused.exit_code, said in refused.output) == (1, True)


def test_only_generated_files_need_room() -> None:
    """A file of the caller takes no disk space."""
    made, given = (floor_bench.FloorPlan(files, GB, 1, tell=print) for files in ((), (Path("x"),)))
    assert floor_bench.BENCH.refusal(made, GB - 1, 0) is not None
    assert (floor_bench.BENCH.refusal(made, GB, 0), floor_bench.BENCH.refusal(given, 0, 0)) == (None, None)
    assert "1 GB: this takes" in str(
        integrity_bench.BENCH.refusal(integrity_bench.IntegrityPlan(GB, 5, tell=print), GB, 9 * GB)
    )


def test_an_unknown_loader_is_wrong_usage() -> None:
    """The error lists the known loaders."""
    wrong = CliRunner().invoke(main, ["load", "--sizes", "0.05", "--loaders", "kelvin,fastest"])
    assert (wrong.exit_code, "fastest: must be of kelvin, tensorizer" in wrong.output.replace("\n", "")) == (2, True)
