"""How warm an idle model is kept never costs more than twice what foresight would; and follows its prices."""

import csv
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.breakeven import (
    KEPT_GAPS,
    MAX_VERSIONS,
    Gaps,
    Level,
    Rung,
    Step,
    best,
    by_length,
    cost,
    level_at,
    next_step,
    plan,
)

TRACES = Path(__file__).parents[4] / "shared" / "traces"


def rungs(
    idle: float = 10.0, memory: float = 1.0, wake_s: float = 0.05, start_s: float = 2.0, wait: float = 10_000.0
) -> tuple[Rung, ...]:
    """As the economy makes them."""
    return (
        Rung(Level.WARM, idle + memory, 0.0),
        Rung(Level.ASLEEP, memory, wake_s * wait),
        Rung(Level.ZERO, 0.0, start_s * wait),
    )


def with_empty(process: float, refill_s: float, start_s: float = 2.0) -> tuple[Rung, ...]:
    """And a level that keeps its process alone."""
    warm, asleep, zero = rungs(start_s=start_s)
    return warm, asleep, Rung(Level.ASLEEP2, process, refill_s * 10_000.0), zero


@pytest.mark.parametrize(
    ("of", "want"),
    [
        pytest.param(rungs(), [(Level.WARM, 0.0), (Level.ASLEEP, 50.0), (Level.ZERO, 19_500.0)], id="each in its time"),
        pytest.param(rungs(memory=0.0), [(Level.WARM, 0.0), (Level.ASLEEP, 50.0)], id="memory that costs nothing"),
        pytest.param(rungs(wait=0.0), [(Level.ZERO, 0.0)], id="waiting that costs nothing: zero at once"),
        pytest.param(rungs(idle=0.0, memory=0.0), [(Level.WARM, 0.0)], id="a device that costs nothing is kept"),
        pytest.param(
            rungs(wake_s=2.0), [(Level.WARM, 0.0), (Level.ZERO, 20_000 / 11)], id="a wake as slow as a start: no sleep"
        ),
        pytest.param(
            with_empty(0.1, 1.0),
            [(Level.WARM, 0.0), (Level.ASLEEP, 50.0), (Level.ASLEEP2, 9_500 / 0.9), (Level.ZERO, 100_000.0)],
            id="weights dropped between: a process that spares half of a start",
        ),
        pytest.param(
            with_empty(0.1, 2.0),
            [(Level.WARM, 0.0), (Level.ASLEEP, 50.0), (Level.ZERO, 19_500.0)],
            id="a process that spares nothing is not kept",
        ),
        pytest.param(
            with_empty(0.1, 1.999),
            [(Level.WARM, 0.0), (Level.ASLEEP, 50.0), (Level.ZERO, 19_500.0)],
            id="nor one that spares less than it costs until then",
        ),
        pytest.param(rungs(start_s=0.05), [(Level.WARM, 0.0), (Level.ZERO, 500 / 11)], id="a start as fast as a wake"),
    ],
)
def test_levels_follow_each_other_at_their_break_even(of: tuple[Rung, ...], want: list[tuple[Level, float]]) -> None:
    """What is never cheapest is left out."""
    found = plan(of)
    assert [step.level for step in found] == [level for level, _ in want]
    assert [step.from_s for step in found] == pytest.approx([from_s for _, from_s in want])


def test_a_level_holds_until_the_next() -> None:
    """On the edge it is the next one."""
    steps = (Step(Level.WARM, 0.0), Step(Level.ASLEEP, 50.0), Step(Level.ZERO, 90.0))
    assert [level_at(steps, idle_s) for idle_s in (0, 49.9, 50, 89, 90, 1e9)] == [
        Level.WARM, Level.WARM, Level.ASLEEP, Level.ASLEEP, Level.ZERO, Level.ZERO
    ]  # fmt: skip
    assert next_step(steps, 60.0) == Step(Level.ZERO, 90.0)
    assert next_step(steps, 90.0) is None


def test_a_pause_costs_what_was_held_and_the_wake() -> None:
    """By hand: 50 s at 11, then 10 s at 1, then a wake of 500."""
    of = rungs()
    assert cost(of, plan(of), 60.0) == pytest.approx(50 * 11 + 10 * 1 + 500)
    assert best(of, 60.0) == pytest.approx(60 + 500)
    assert best(of, 10.0) == pytest.approx(110)


MONEY = st.floats(0.0, 1e6)
RUNGS = st.lists(st.tuples(MONEY, MONEY), min_size=2, max_size=3).map(
    lambda found: (
        Rung(Level.WARM, max(hold for hold, _ in found) + 1.0, 0.0),
        *(Rung(level, *each) for level, each in zip((Level.ASLEEP, Level.ASLEEP2, Level.ZERO), found, strict=False)),
    )
)


@given(of=RUNGS, gaps=st.lists(st.floats(0.0, 1e7), max_size=20))
def test_never_more_than_twice_of_what_foresight_costs(of: tuple[Rung, ...], gaps: list[float]) -> None:
    """The classical bound, pause by pause and so on any trace."""
    steps = plan(of)
    for gap_s in gaps:
        assert cost(of, steps, gap_s) <= 2 * best(of, gap_s) * (1 + 1e-9) + 1e-6


def test_another_plan_breaks_the_bound() -> None:
    """Negative control: one that sleeps at once, and one that never does, are both found to cost more than twice."""
    of = rungs()
    eager = (Step(Level.ZERO, 0.0),)
    stubborn = (Step(Level.WARM, 0.0),)
    assert cost(of, eager, 3.0) > 2 * best(of, 3.0)
    assert cost(of, stubborn, 1e6) > 2 * best(of, 1e6)


@given(
    prices=st.tuples(st.floats(0.01, 1e4), st.floats(0.0, 10.0), st.floats(0.001, 1.0), st.floats(1.0, 10.0)),
    wait=st.floats(1.0, 1e6),
    more=st.floats(1.0, 100.0),
)
def test_dearer_waiting_keeps_it_warmer_and_a_dearer_device_colder(
    prices: tuple[float, float, float, float], wait: float, more: float
) -> None:
    """Monotone: at no idle time does a higher price of waiting give a colder level, nor one of the device a warmer."""
    idle, memory, wake_s, start_s = prices
    order = list(Level)

    def levels(idle: float, wait: float) -> list[int]:
        steps = plan(rungs(idle, memory, wake_s, start_s, wait))
        return [order.index(level_at(steps, 2.0**power)) for power in range(-4, 30)]

    base = levels(idle, wait)
    assert all(dear <= cheap for dear, cheap in zip(levels(idle, wait * more), base, strict=True))
    assert all((dear != 0) >= (cheap != 0) for dear, cheap in zip(levels(idle * more, wait), base, strict=True))


def test_pauses_are_counted_and_bounded() -> None:
    """The last of each version, of the versions that were busy last; short ones are none."""
    gaps = Gaps[int]()
    assert gaps.idle_s(1, 5.0) is None
    for second in range(0, 10 * (KEPT_GAPS + 5), 10):
        gaps.busy(1, float(second))
    assert gaps.of(1) == (10.0,) * KEPT_GAPS
    gaps.busy(2, 0.0)
    gaps.busy(2, 1.9)
    assert gaps.of(2) == ()
    assert gaps.idle_s(2, 5.0) == pytest.approx(3.1)
    for version in range(3, MAX_VERSIONS + 3):
        gaps.busy(version, 0.0)
    assert gaps.of(1) == ()
    assert by_length((2.0, 2.1, 4.0, 100.0)) == {2: 1, 4: 2, 128: 1}


def _trace() -> list[float]:
    """Arrivals of Azure's trace in seconds."""
    path = TRACES / "AzureLLMInferenceTrace_code.csv"
    if not path.exists():
        pytest.skip("the trace is not beside this checkout")
    with path.open() as file:
        rows = [row["TIMESTAMP"] for row in csv.DictReader(file)]
    return sorted(datetime.fromisoformat(stamp[:26]).timestamp() for stamp in rows)


@pytest.mark.parametrize("share", [1, 50, 500])
def test_on_a_recorded_trace(share: int) -> None:
    """A model that gets one request in `share`: never over twice of foresight, never dearer than any level throughout
    at its worst."""
    arrivals = _trace()[::share]
    gaps = [after - before for before, after in pairwise(arrivals)]
    of = rungs(start_s=0.5)
    steps = plan(of)
    paid = sum(cost(of, steps, gap_s) for gap_s in gaps)
    assert paid <= 2 * sum(best(of, gap_s) for gap_s in gaps)
    always = [sum(rung.hold * gap_s + rung.wake for gap_s in gaps) for rung in of]
    assert paid <= max(always)
