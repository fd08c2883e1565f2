"""Standby demand: the rate of takes, the time of replacements, and how many takes were outstanding at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.standby_demand import (
    DEFAULT_REPLACE_S,
    MAX_OUTSTANDING,
    MAX_REPLACE_S,
    MEMORY_S,
    RECENT_S,
    StandbyDemand,
)


def outstanding_weights(demand: StandbyDemand, now_s: float) -> list[float]:
    """Return the weights, rounded and without trailing zeros."""
    found = [round(weight, 6) for weight in demand.estimate(now_s).outstanding_weights]
    while found and not found[-1]:
        found.pop()
    return found


def test_initial_estimate_is_the_prior() -> None:
    """There is no rate, a default replacement time, and only the prior weight."""
    takes = StandbyDemand().estimate(0.0)
    assert (takes.per_s, takes.replace_s) == (0.0, DEFAULT_REPLACE_S)
    assert outstanding_weights(StandbyDemand(), 0.0) == [1.0]


def test_take_is_outstanding_until_replaced() -> None:
    """Three takes at once are the first, second and third. A take after two replacements is the second."""
    demand = StandbyDemand()
    for _ in range(3):
        demand.record_take(10.0)
    assert outstanding_weights(demand, 10.0) == [2.0, 1.0, 1.0]
    demand.record_replacement(10.4)
    demand.record_replacement(10.4)
    demand.record_take(10.4)
    weights = demand.estimate(10.4).outstanding_weights
    assert weights[1] == pytest.approx(2.0, abs=1e-3)


def test_full_pool_clears_outstanding_takes() -> None:
    """Otherwise a take whose standby came back unused would be outstanding for ever."""
    demand = StandbyDemand()
    demand.record_take(0.0)
    demand.clear_outstanding()
    demand.record_take(1.0)
    assert demand.estimate(1.0).outstanding_weights[1] == 0.0


def test_replacement_time_is_averaged() -> None:
    """A new value weighs a fifth. An hour counts as a minute, and a replacement without a take does not count."""
    demand = StandbyDemand()
    demand.record_replacement(5.0)
    assert demand.estimate(5.0).replace_s == DEFAULT_REPLACE_S
    demand.record_take(5.0)
    demand.record_replacement(6.0)
    assert demand.estimate(6.0).replace_s == pytest.approx(DEFAULT_REPLACE_S + 0.2 * (1.0 - DEFAULT_REPLACE_S))
    before = demand.estimate(6.0).replace_s
    demand.record_take(6.0)
    demand.record_replacement(3606.0)
    assert demand.estimate(3606.0).replace_s == pytest.approx(before + 0.2 * (MAX_REPLACE_S - before))


def test_rate_rises_within_a_minute_and_decays() -> None:
    """One take per second for five minutes gives that rate. A day later the rate is almost zero."""
    demand = StandbyDemand()
    for second in range(300):
        demand.record_take(float(second))
        demand.clear_outstanding()
    assert demand.estimate(300.0).per_s == pytest.approx(1.0, rel=0.02)
    assert demand.estimate(300.0 + 5 * RECENT_S).per_s < 0.03
    assert demand.estimate(300.0 + 10 * MEMORY_S).per_s < 1e-5
    assert outstanding_weights(demand, 300.0 + 30 * MEMORY_S) == [1.0]


STEP = st.tuples(st.sampled_from(["taken", "replaced", "settled"]), st.floats(0, 1e5))


@given(st.lists(STEP, max_size=200))
def test_weights_stay_bounded_for_any_history(steps: list[tuple[str, float]]) -> None:
    """No weight is negative, and the sum is at most one per take. Time may stand still."""
    demand, now_s, count = StandbyDemand(), 0.0, 0
    for what, passed_s in steps:
        now_s += passed_s
        if what == "taken":
            demand.record_take(now_s)
            count += 1
        elif what == "replaced":
            demand.record_replacement(now_s)
        else:
            demand.clear_outstanding()
        demand.check_integrity()
    takes = demand.estimate(now_s)
    assert len(takes.outstanding_weights) == MAX_OUTSTANDING
    assert 1.0 <= sum(takes.outstanding_weights) <= count + 1.0 + 1e-9
    assert 0.0 <= takes.replace_s <= MAX_REPLACE_S
    assert 0.0 <= takes.per_s <= count / RECENT_S + 1e-9
