"""Standby pool size: Poisson quantile, observed bursts, share of running replicas, minimum, maximum and memory
budget.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.standby_demand import DemandEstimate
from controlplane.scaling.policy.standby_sizing import (
    SHRINK_S,
    PoolLoad,
    PoolSizing,
    SizeReason,
    TargetSize,
    hit_probability_at_rate,
    next_size,
    observed_hit_ratio,
    standbys_for_history,
    standbys_for_rate,
    target_size,
)
from tests.controlplane.scaling.policy.pool_simulation import bursts, poisson, simulate

MIB = 1 << 20
USUAL = PoolSizing(minimum=1, maximum=32, target=0.99, share=0.15, budget_bytes=1 << 30)
ALONE = (1.0,)


@pytest.mark.parametrize(
    ("mean", "standbys", "want"),
    [
        pytest.param(0.0, 1, 1.0, id="no takes"),
        pytest.param(1.0, 0, 0.0, id="no standby"),
        pytest.param(1.0, 1, math.exp(-1), id="one standby: a hit with nothing outstanding"),
        pytest.param(0.8, 3, math.exp(-0.8) * (1 + 0.8 + 0.32), id="three standbys: a hit with two outstanding"),
        pytest.param(0.8, 4, 0.990920, id="0.8 and four, from Poisson tables"),
        pytest.param(10.0, 19, 0.992813, id="ten and nineteen, from Poisson tables"),
    ],
)
def test_found_at_rate(mean: float, standbys: int, want: float) -> None:
    """The probability is P(Poisson(mean) < standbys)."""
    assert hit_probability_at_rate(mean, standbys) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("mean", "target", "want"),
    [
        pytest.param(0.0, 0.99, 1, id="no takes: one standby all the same"),
        pytest.param(0.01, 0.99, 1, id="one take in 50 s, replaced in 0.5 s"),
        pytest.param(0.011, 0.99, 2, id="slightly more takes need two"),
        pytest.param(0.8, 0.99, 4, id="two takes a second, replaced in 0.4 s"),
        pytest.param(0.8, 0.95, 3, id="a lower target needs fewer"),
        pytest.param(10.0, 0.99, 19, id="a mean of ten outstanding"),
        pytest.param(1e9, 0.99, 32, id="at most the maximum"),
    ],
)
def test_enough_for_rate(mean: float, target: float, want: int) -> None:
    """The result is the smallest pool that reaches the target."""
    assert standbys_for_rate(mean, target, 32) == want


def load(
    rate: float = 0.0,
    replace_s: float = 0.4,
    together: tuple[float, ...] = ALONE,
    running: int = 0,
    standby_bytes: int = 32 * MIB,
) -> PoolLoad:
    return PoolLoad(DemandEstimate(rate, replace_s, together), running, standby_bytes)


@pytest.mark.parametrize(
    ("sizing", "now", "want"),
    [
        pytest.param(USUAL, load(), (1, SizeReason.LEAST), id="the minimum"),
        pytest.param(
            PoolSizing(0, 8, 0.99, 0.15, 1 << 30), load(5.0, running=8), (0, SizeReason.OFF), id="the pool is off"
        ),
        pytest.param(USUAL, load(rate=2.0), (4, SizeReason.RATE), id="starts come often"),
        pytest.param(USUAL, load(together=(10.0, 5.0, 5.0)), (3, SizeReason.BURSTS), id="three takes came at once"),
        pytest.param(
            USUAL, load(together=(1000.0, 5.0, 1.0)), (1, SizeReason.LEAST), id="bursts of long ago have little weight"
        ),
        pytest.param(USUAL, load(running=7), (2, SizeReason.SHARE), id="15 % of seven, rounded up"),
        pytest.param(USUAL, load(running=6), (1, SizeReason.LEAST), id="15 % of six are one"),
        pytest.param(USUAL, load(rate=100.0), (32, SizeReason.MOST), id="at most the maximum, for a high rate"),
        pytest.param(
            USUAL,
            load(rate=2.0, standby_bytes=512 * MIB),
            (2, SizeReason.BUDGET),
            id="the memory budget bounds the size",
        ),
        pytest.param(
            PoolSizing(8, 8, 0.99, 0.15, 64 * MIB),
            load(),
            (2, SizeReason.BUDGET),
            id="the memory budget bounds the minimum, too",
        ),
        pytest.param(USUAL, load(standby_bytes=0), (1, SizeReason.LEAST), id="a measured size of zero"),
    ],
)
def test_size(sizing: PoolSizing, now: PoolLoad, want: tuple[int, SizeReason]) -> None:
    """The size is the largest demand within maximum and budget, with its reason."""
    decided = target_size(sizing, now)
    assert (decided.wanted, decided.reason) == want


def test_hit_probability_is_the_lower_of_rate_and_bursts() -> None:
    """With no standby it is zero."""
    assert target_size(USUAL, load(rate=2.0)).probability == pytest.approx(0.990920, abs=1e-6)
    assert target_size(USUAL, load(together=(90.0, 9.5, 0.5))) == TargetSize(2, SizeReason.BURSTS, pytest.approx(0.995))  # type: ignore[arg-type]
    assert target_size(PoolSizing(1, 8, 0.99, 0.15, MIB), load()).probability == 0.0


RATES = st.floats(0, 1e4)
TIMES = st.floats(0, 60)
TARGETS = st.floats(0.5, 0.9999)
WEIGHTS = st.lists(st.floats(0, 1e6), max_size=63).map(lambda more: (1.0, *more))


@given(RATES, RATES, TIMES, TIMES, TARGETS, TARGETS)
def test_standbys_are_monotone_in_rate_time_and_target(
    rate: float, more: float, time_s: float, longer: float, target: float, surer: float
) -> None:
    """The result is between one and the maximum, and the smallest that meets the target if the maximum allows it."""
    target, surer = sorted((target, surer))
    few, many = (
        standbys_for_rate(rate * time_s, target, 32),
        standbys_for_rate((rate + more) * (time_s + longer), surer, 32),
    )
    assert 1 <= few <= many <= 32
    assert few == 32 or hit_probability_at_rate(rate * time_s, few) >= target
    assert few == 1 or hit_probability_at_rate(rate * time_s, few - 1) < target


@given(WEIGHTS, TARGETS, TARGETS)
def test_standbys_for_history_is_the_smallest_that_meets_target(
    together: tuple[float, ...], target: float, surer: float
) -> None:
    """This holds for any history of outstanding takes."""
    target, surer = sorted((target, surer))
    few = standbys_for_history(together, target)
    assert 1 <= few <= standbys_for_history(together, surer) <= len(together)
    assert observed_hit_ratio(together, few) >= target * (1 - 1e-9)
    assert few == 1 or observed_hit_ratio(together, few - 1) <= target * (1 + 1e-9)


@given(
    st.builds(
        PoolSizing, st.integers(1, 64), st.integers(64, 1024), TARGETS, st.floats(0, 1), st.integers(MIB, 1 << 40)
    ),
    st.builds(
        PoolLoad, st.builds(DemandEstimate, RATES, TIMES, WEIGHTS), st.integers(0, 1024), st.integers(1, 1 << 40)
    ),
)
def test_size_is_within_its_bounds(sizing: PoolSizing, now: PoolLoad) -> None:
    """The memory budget comes before the minimum."""
    decided = target_size(sizing, now)
    assert 0 <= decided.wanted <= sizing.maximum
    assert decided.wanted * now.standby_bytes <= sizing.budget_bytes
    assert decided.reason is SizeReason.BUDGET or decided.wanted >= sizing.minimum
    assert 0.0 <= decided.probability <= 1.0


def test_pool_grows_at_once_and_shrinks_slowly() -> None:
    """It shrinks by one after SHRINK_S without need."""
    assert next_size(2, 5, 0.0) == 5
    assert next_size(5, 2, SHRINK_S - 1) == 5
    assert next_size(5, 2, SHRINK_S) == 4
    assert next_size(5, 5, 1e9) == 5


@pytest.mark.parametrize("rate", [0.05, 0.5, 2.0])
def test_the_target_is_met_on_a_poisson_trace(rate: float) -> None:
    """99 of 100 takes are hits, with demand learned from the trace. A pool one smaller, or of one, misses the
    target.
    """
    wanted = standbys_for_rate(rate * 0.4, USUAL.target, USUAL.maximum)
    share, largest = simulate(poisson(rate, 3000), 0.4, USUAL)
    assert share >= USUAL.target
    assert largest <= wanted + 2, "the pool fits the rate"
    assert simulate(poisson(rate, 3000), 0.4, USUAL, fewer=1)[0] < USUAL.target
    assert simulate(poisson(rate, 3000), 0.4, USUAL, fixed=wanted - 1)[0] < USUAL.target
    assert simulate(poisson(rate, 3000), 0.4, USUAL, fixed=1)[0] < USUAL.target


def test_the_target_is_met_on_a_bursty_trace() -> None:
    """Bursts of three takes on average come twice a minute. A pool for the rate alone, or of one, misses the target."""
    share, largest = simulate(bursts(30.0, 3.0, 3000), 0.4, USUAL)
    assert share >= USUAL.target
    assert largest < USUAL.maximum
    of_rate = standbys_for_rate(0.1 * 0.4, USUAL.target, USUAL.maximum)
    assert simulate(bursts(30.0, 3.0, 3000), 0.4, USUAL, fixed=of_rate)[0] < 0.6
    assert simulate(bursts(30.0, 3.0, 3000), 0.4, USUAL, fixed=1)[0] < 0.4
