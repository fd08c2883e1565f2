"""Claims pass on good results and fail on bad ones. Without a measurement they do neither."""

from collections.abc import Mapping, Sequence

import pytest

from coldstart_bench.report.bench_report import BenchReport, ClaimVerdict, Key, MissingFigure
from coldstart_bench.report.load_report import LoadFigures, LoadRow, LoadTiming, judge, rows_of, table

SIZE = 2_000_000_000
FLOORS: Mapping[Key, Sequence[float]] = {
    (SIZE, "cold", "floor: O_DIRECT, 1 threads"): [0.60, 0.70, 0.60],
    (SIZE, "cold", "floor: O_DIRECT, 2 threads"): [0.50, 0.50, 0.50],
    (SIZE, "hot", "floor: page cache, 1 threads"): [0.20],
}
GOOD: Mapping[Key, LoadTiming] = {
    (SIZE, "cold", "kelvin"): LoadTiming(0.54, 0.2),
    (SIZE, "hot", "kelvin"): LoadTiming(0.30, 0.2),
    (SIZE, "host", "kelvin"): LoadTiming(0.005, 0.2),
    (SIZE, "cold", "tensorizer-verify"): LoadTiming(1.5, 0.2),
    (SIZE, "hot", "tensorizer-verify"): LoadTiming(1.2, 0.2),
    (SIZE, "cold", "mmap"): LoadTiming(0.001, 0.9),
    (SIZE, "hot", "mmap"): LoadTiming(0.001, 0.4),
}


def rows(takes: Mapping[Key, LoadTiming] = GOOD) -> tuple[LoadRow, ...]:
    return rows_of({key: [take, take, take] for key, take in takes.items()}, FLOORS)


def judged(rows: tuple[LoadRow, ...]) -> tuple[ClaimVerdict, ...]:
    return judge(LoadFigures(rows, "cpu"))


def failing(takes: Mapping[Key, LoadTiming]) -> list[tuple[str, str]]:
    return [(verdict.state, verdict.claim) for verdict in judged(rows(takes)) if verdict.passed is False]


def test_a_row_stands_beside_the_fastest_floor_of_its_size_and_state() -> None:
    """The ratio uses the total time, consumer included. Floors come first."""
    found = rows()
    ours = next(row for row in found if (row.state, row.system) == ("cold", "kelvin"))
    assert ours.total_s == pytest.approx(0.74)
    assert ours.total_to_floor == pytest.approx(0.74 / 0.50)
    assert [row.system for row in found[:2]] == ["floor: O_DIRECT, 2 threads", "floor: O_DIRECT, 1 threads"]
    assert next(row for row in found if row.state == "host").total_to_floor is None


def test_good_figures_pass() -> None:
    assert [verdict.passed for verdict in judged(rows())] == [True] * 9


@pytest.mark.parametrize(
    ("state", "system", "take", "claim"),
    [
        pytest.param(
            "cold", "kelvin", LoadTiming(0.56, 0.2), "rate of the verified", id="slower than 0.90 of the disk"
        ),
        pytest.param(
            "cold", "tensorizer-verify", LoadTiming(0.5, 0.2), "fastest verifying", id="another verifies faster"
        ),
        pytest.param("hot", "tensorizer-verify", LoadTiming(0.7, 0.2), "tensorizer with verify_hash", id="under twice"),
        pytest.param(
            "cold", "mmap", LoadTiming(0.0, 0.7), "the fastest loader to ours", id="any loader is faster from disk"
        ),
        pytest.param(
            "host", "kelvin", LoadTiming(0.005, 0.45), "the fastest loader, page", id="slower than the page cache"
        ),
        pytest.param(
            "hot", "kelvin", LoadTiming(0.5, 0.2), "our time to the fastest", id="over 1.6 times an unverified one"
        ),
        pytest.param(
            "host", "kelvin", LoadTiming(0.06, 0.2), "seconds until tensors", id="bound after more than 50 ms"
        ),
    ],
)
def test_a_bad_figure_fails(state: str, system: str, take: LoadTiming, claim: str) -> None:
    """Each claim has a bad result that fails it."""
    bad = {key: take if key[1:] == (state, system) else good for key, good in GOOD.items()}
    assert any(at == state and claim in said for at, said in failing(bad)), failing(bad)


def test_unmeasured_figure_is_not_judged() -> None:
    """Without a measurement, and for small models, no claim is judged."""
    alone = judged(rows({(SIZE, "hot", "mmap"): GOOD[SIZE, "hot", "mmap"]}))
    assert {verdict.passed for verdict in alone} == {None}
    tiny = rows_of(
        {(10**8, "cold", "kelvin"): [LoadTiming(0.2, 0.1)]}, {(10**8, "cold", "floor: O_DIRECT, 1 threads"): [0.1]}
    )
    first = judged(tiny)[0]
    assert first.passed is None
    assert first.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("failure", "passed"),
    [
        pytest.param(MissingFigure("mmap", "WRONG BYTES", SIZE, "hot"), False, id="a loader gave other bytes"),
        pytest.param(MissingFigure("runai", "not installed"), True, id="one is not installed"),
    ],
)
def test_the_exit_says_whether_each_loader_has_a_figure(failure: MissingFigure, passed: bool) -> None:
    """A failed claim alone does not fail the run; a loader with wrong bytes does."""
    slow = {key: LoadTiming(9.0, 9.0) if key[2] == "kelvin" else take for key, take in GOOD.items()}
    found = LoadFigures(rows(slow), "cpu", failures=(failure,))
    assert failing(slow)
    assert BenchReport(found, judge(found), {}, 0.0, None).passed is passed


def test_the_table_has_a_row_for_each() -> None:
    """Floors verify nothing, and a row without a floor has no ratio."""
    lines = [line.split() for line in table(LoadFigures(rows(), "cpu")).splitlines()[1:]]
    assert len(lines) == len(FLOORS) + len(GOOD)
    assert lines[2][:7] == ["2.00GB", "cold", "kelvin", "yes", "540.0ms", "200.0ms", "740.0ms"]
    assert (lines[2][-1], lines[-1][1], lines[-1][-1]) == ("1.48x", "host", "3")
