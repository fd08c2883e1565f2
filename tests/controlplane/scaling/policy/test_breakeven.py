"""The idle plan of a model costs at most twice the optimum with foresight, and follows its prices."""

import csv
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.breakeven import (
    MAX_GAPS,
    MAX_VERSIONS,
    IdleGaps,
    Level,
    LevelChange,
    LevelPrice,
    gap_histogram,
    level_after,
    next_level_change,
    optimal_pause_cost,
    pause_cost,
    plan_levels,
)

TRACES = Path(__file__).parents[5] / "shared" / "traces"


def level_prices(
    idle: float = 10.0, memory: float = 1.0, wake_s: float = 0.05, start_s: float = 2.0, wait: float = 10_000.0
) -> tuple[LevelPrice, ...]:
    """Return level prices as WarmthCost makes them."""
    return (
        LevelPrice(Level.WARM, idle + memory, 0.0),
        LevelPrice(Level.ASLEEP, memory, wake_s * wait),
        LevelPrice(Level.ZERO, 0.0, start_s * wait),
    )


def with_empty(process: float, refill_s: float, start_s: float = 2.0) -> tuple[LevelPrice, ...]:
    """Return level prices with a level that keeps only the process."""
    warm, asleep, zero = level_prices(start_s=start_s)
    return warm, asleep, LevelPrice(Level.DEEP_SLEEP, process, refill_s * 10_000.0), zero


@pytest.mark.parametrize(
    ("of", "want"),
    [
        pytest.param(
            level_prices(),
            [(Level.WARM, 0.0), (Level.ASLEEP, 50.0), (Level.ZERO, 19_500.0)],
            id="each level from its break-even",
        ),
        pytest.param(
            level_prices(memory=0.0), [(Level.WARM, 0.0), (Level.ASLEEP, 50.0)], id="free memory: asleep for ever"
        ),
        pytest.param(level_prices(wait=0.0), [(Level.ZERO, 0.0)], id="free waiting: zero at once"),
        pytest.param(level_prices(idle=0.0, memory=0.0), [(Level.WARM, 0.0)], id="a free device stays warm"),
        pytest.param(
            level_prices(wake_s=2.0),
            [(Level.WARM, 0.0), (Level.ZERO, 20_000 / 11)],
            id="a wake as slow as a start: no sleep",
        ),
        pytest.param(
            with_empty(0.1, 1.0),
            [(Level.WARM, 0.0), (Level.ASLEEP, 50.0), (Level.DEEP_SLEEP, 9_500 / 0.9), (Level.ZERO, 100_000.0)],
            id="a process that saves half of a start is kept without weights",
        ),
        pytest.param(
            with_empty(0.1, 2.0),
            [(Level.WARM, 0.0), (Level.ASLEEP, 50.0), (Level.ZERO, 19_500.0)],
            id="a process that saves nothing is not kept",
        ),
        pytest.param(
            with_empty(0.1, 1.999),
            [(Level.WARM, 0.0), (Level.ASLEEP, 50.0), (Level.ZERO, 19_500.0)],
            id="a process that saves less than it costs is not kept",
        ),
        pytest.param(
            level_prices(start_s=0.05),
            [(Level.WARM, 0.0), (Level.ZERO, 500 / 11)],
            id="a start as fast as a wake: no sleep",
        ),
    ],
)
def test_plan_changes_level_at_each_break_even_point(
    of: tuple[LevelPrice, ...], want: list[tuple[Level, float]]
) -> None:
    """A level that is never the cheapest is left out."""
    found = plan_levels(of)
    assert [step.level for step in found] == [level for level, _ in want]
    assert [step.from_s for step in found] == pytest.approx([from_s for _, from_s in want])


def test_level_lasts_until_next_change() -> None:
    """At the exact time of a change the next level holds."""
    steps = (LevelChange(Level.WARM, 0.0), LevelChange(Level.ASLEEP, 50.0), LevelChange(Level.ZERO, 90.0))
    assert [level_after(steps, idle_s) for idle_s in (0, 49.9, 50, 89, 90, 1e9)] == [
        Level.WARM, Level.WARM, Level.ASLEEP, Level.ASLEEP, Level.ZERO, Level.ZERO
    ]  # fmt: skip
    assert next_level_change(steps, 60.0) == LevelChange(Level.ZERO, 90.0)
    assert next_level_change(steps, 90.0) is None


def test_pause_cost_is_holding_plus_wake() -> None:
    """By hand: 50 s at 11, then 10 s at 1, then a wake of 500."""
    of = level_prices()
    assert pause_cost(of, plan_levels(of), 60.0) == pytest.approx(50 * 11 + 10 * 1 + 500)
    assert optimal_pause_cost(of, 60.0) == pytest.approx(60 + 500)
    assert optimal_pause_cost(of, 10.0) == pytest.approx(110)


MONEY = st.floats(0.0, 1e6)
LEVEL_PRICES = st.lists(st.tuples(MONEY, MONEY), min_size=2, max_size=3).map(
    lambda found: (
        LevelPrice(Level.WARM, max(hold for hold, _ in found) + 1.0, 0.0),
        *(
            LevelPrice(level, *each)
            for level, each in zip((Level.ASLEEP, Level.DEEP_SLEEP, Level.ZERO), found, strict=False)
        ),
    )
)


@given(of=LEVEL_PRICES, gaps=st.lists(st.floats(0.0, 1e7), max_size=20))
def test_plan_costs_at_most_twice_the_optimum(of: tuple[LevelPrice, ...], gaps: list[float]) -> None:
    """The classical ski-rental bound holds for each pause, so for any trace."""
    steps = plan_levels(of)
    for gap_s in gaps:
        assert pause_cost(of, steps, gap_s) <= 2 * optimal_pause_cost(of, gap_s) * (1 + 1e-9) + 1e-6


def test_other_plans_exceed_twice_the_optimum() -> None:
    """Negative control: a plan of zero at once and one of always warm both cost more than twice."""
    of = level_prices()
    eager = (LevelChange(Level.ZERO, 0.0),)
    stubborn = (LevelChange(Level.WARM, 0.0),)
    assert pause_cost(of, eager, 3.0) > 2 * optimal_pause_cost(of, 3.0)
    assert pause_cost(of, stubborn, 1e6) > 2 * optimal_pause_cost(of, 1e6)


@given(
    prices=st.tuples(st.floats(0.01, 1e4), st.floats(0.0, 10.0), st.floats(0.001, 1.0), st.floats(1.0, 10.0)),
    wait=st.floats(1.0, 1e6),
    more=st.floats(1.0, 100.0),
)
def test_level_is_monotone_in_wait_and_device_price(
    prices: tuple[float, float, float, float], wait: float, more: float
) -> None:
    """At no idle time does a higher price of waiting give a colder level, or a higher device price a warm one."""
    idle, memory, wake_s, start_s = prices
    order = list(Level)

    def levels(idle: float, wait: float) -> list[int]:
        steps = plan_levels(level_prices(idle, memory, wake_s, start_s, wait))
        return [order.index(level_after(steps, 2.0**power)) for power in range(-4, 30)]

    base = levels(idle, wait)
    assert all(dear <= cheap for dear, cheap in zip(levels(idle, wait * more), base, strict=True))
    assert all((dear != 0) >= (cheap != 0) for dear, cheap in zip(levels(idle * more, wait), base, strict=True))


def test_idle_gaps_are_recorded_and_bounded() -> None:
    """The last MAX_GAPS gaps of the last MAX_VERSIONS versions are kept. Gaps under two seconds are not."""
    gaps = IdleGaps[int]()
    assert gaps.idle_s(1, 5.0) is None
    for second in range(0, 10 * (MAX_GAPS + 5), 10):
        gaps.record_request(1, float(second))
    assert gaps.gaps_of(1) == (10.0,) * MAX_GAPS
    gaps.record_request(2, 0.0)
    gaps.record_request(2, 1.9)
    assert gaps.gaps_of(2) == ()
    assert gaps.idle_s(2, 5.0) == pytest.approx(3.1)
    for version in range(3, MAX_VERSIONS + 3):
        gaps.record_request(version, 0.0)
    assert gaps.gaps_of(1) == ()
    assert gap_histogram((2.0, 2.1, 4.0, 100.0)) == {2: 1, 4: 2, 128: 1}


def _trace() -> list[float]:
    """Return the arrival times of Azure's trace in seconds."""
    path = TRACES / "AzureLLMInferenceTrace_code.csv"
    if not path.exists():
        pytest.skip("the trace is not in shared/traces")
    with path.open() as file:
        rows = [row["TIMESTAMP"] for row in csv.DictReader(file)]
    return sorted(datetime.fromisoformat(stamp[:26]).timestamp() for stamp in rows)


@pytest.mark.parametrize("share", [1, 50, 500])
def test_plan_is_cheapest_on_recorded_trace(share: int) -> None:
    """A model gets one request in `share`. The plan costs at most twice the optimum, and at most the dearest fixed
    level.
    """
    arrivals = _trace()[::share]
    gaps = [after - before for before, after in pairwise(arrivals)]
    of = level_prices(start_s=0.5)
    steps = plan_levels(of)
    paid = sum(pause_cost(of, steps, gap_s) for gap_s in gaps)
    assert paid <= 2 * sum(optimal_pause_cost(of, gap_s) for gap_s in gaps)
    always = [sum(level.hold * gap_s + level.wake for gap_s in gaps) for level in of]
    assert paid <= max(always)
