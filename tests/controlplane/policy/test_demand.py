"""What is remembered of takes: their rate, how long replacements take, how many were outstanding at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.demand import FIRST_GUESS_S, LONGEST_S, MEMORY_S, MOST_TOGETHER, QUICK_S, Demand


def together(demand: Demand, now_s: float) -> list[float]:
    """Weights without the zeros at the end, rounded."""
    found = [round(weight, 6) for weight in demand.at(now_s).together]
    while found and not found[-1]:
        found.pop()
    return found


def test_nothing_is_known_at_first() -> None:
    """No rate, a guess of the time, the prior alone."""
    takes = Demand().at(0.0)
    assert (takes.per_s, takes.replace_s) == (0.0, FIRST_GUESS_S)
    assert together(Demand(), 0.0) == [1.0]


def test_takes_are_outstanding_until_they_are_made_up_for() -> None:
    """Three at once are the first, second and third; one that comes after two replacements is the second."""
    demand = Demand()
    for _ in range(3):
        demand.taken(10.0)
    assert together(demand, 10.0) == [2.0, 1.0, 1.0]
    demand.replaced(10.4)
    demand.replaced(10.4)
    demand.taken(10.4)
    weights = demand.at(10.4).together
    assert weights[1] == pytest.approx(2.0, abs=1e-3)


def test_a_full_pool_has_nothing_outstanding() -> None:
    """A take whose standby came back unused would be outstanding for ever."""
    demand = Demand()
    demand.taken(0.0)
    demand.settled()
    demand.taken(1.0)
    assert demand.at(1.0).together[1] == 0.0


def test_the_time_of_replacements_is_averaged() -> None:
    """A fifth of each new one; a zygote that was away for an hour counts as a minute; without a take nothing counts."""
    demand = Demand()
    demand.replaced(5.0)
    assert demand.at(5.0).replace_s == FIRST_GUESS_S
    demand.taken(5.0)
    demand.replaced(6.0)
    assert demand.at(6.0).replace_s == pytest.approx(FIRST_GUESS_S + 0.2 * (1.0 - FIRST_GUESS_S))
    before = demand.at(6.0).replace_s
    demand.taken(6.0)
    demand.replaced(3606.0)
    assert demand.at(3606.0).replace_s == pytest.approx(before + 0.2 * (LONGEST_S - before))


def test_a_rate_rises_within_a_minute_and_is_forgotten() -> None:
    """One take per second for five minutes is seen as such; a day later as nothing."""
    demand = Demand()
    for second in range(300):
        demand.taken(float(second))
        demand.settled()
    assert demand.at(300.0).per_s == pytest.approx(1.0, rel=0.02)
    assert demand.at(300.0 + 5 * QUICK_S).per_s < 0.03
    assert demand.at(300.0 + 10 * MEMORY_S).per_s < 1e-5
    assert together(demand, 300.0 + 30 * MEMORY_S) == [1.0]


STEP = st.tuples(st.sampled_from(["taken", "replaced", "settled"]), st.floats(0, 1e5))


@given(st.lists(STEP, max_size=200))
def test_any_history_is_bounded(steps: list[tuple[str, float]]) -> None:
    """No weight below zero, none that no take gave, whatever comes in which order; time may stand still."""
    demand, now_s, count = Demand(), 0.0, 0
    for what, passed_s in steps:
        now_s += passed_s
        if what == "taken":
            demand.taken(now_s)
            count += 1
        elif what == "replaced":
            demand.replaced(now_s)
        else:
            demand.settled()
        demand.check_integrity()
    takes = demand.at(now_s)
    assert len(takes.together) == MOST_TOGETHER
    assert 1.0 <= sum(takes.together) <= count + 1.0 + 1e-9
    assert 0.0 <= takes.replace_s <= LONGEST_S
    assert 0.0 <= takes.per_s <= count / QUICK_S + 1e-9
