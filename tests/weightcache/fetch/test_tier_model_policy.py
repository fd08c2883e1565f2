"""Learning tier speeds from loads: a steady tier is known after a few loads of any size, and bad figures do no harm."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightcache.fetch.tier_model_policy import (
    INITIAL_SPEEDS,
    LARGE_BYTES,
    TierModel,
    TierSpeed,
    file_reload_estimator,
    predict_load_s,
    slab_reload_estimator,
)

GB = 10**9
MIB = 1 << 20


def test_a_guess_is_used_until_something_is_known() -> None:
    """Before any load the guess is used. Bytes of the host tier take no time."""
    rates = TierModel({"nvme": TierSpeed(1e9, 0.5)})
    assert rates.load_time_s({"host": 5 * GB, "nvme": 2 * GB}) == pytest.approx(2.5)
    assert rates.load_time_s({"host": 5 * GB, "nvme": 0}) == 0.0
    assert rates.by_tier["nvme"].loads == 0


def test_first_load_replaces_the_guess() -> None:
    """The first measurement replaces the guess."""
    rates = TierModel({"nvme": TierSpeed(1e9, 0.0)})
    rates.observe({"nvme": GB}, 4.0)
    assert rates.by_tier["nvme"] == TierSpeed(pytest.approx(0.25e9), 0.0, 1, 1)  # type: ignore[arg-type]


def test_small_loads_teach_fixed_time_and_large_ones_rate() -> None:
    """A small load changes only the fixed time, and a large one the rate."""
    rates = TierModel({"nvme": TierSpeed(1e9, 0.01)})
    rates.observe({"nvme": 1_000_000}, 0.2)
    assert rates.by_tier["nvme"].fixed_s == pytest.approx(0.199)
    assert rates.by_tier["nvme"].bytes_per_s == pytest.approx(1e9)
    rates.observe({"nvme": GB}, 2.199)
    assert rates.load_time_s({"nvme": GB}) == pytest.approx(2.199)
    rates.observe({"nvme": GB}, 3.199)
    assert rates.load_time_s({"nvme": GB}) == pytest.approx(0.7 * 2.0 + 0.3 * 3.0 + 0.199)


@settings(max_examples=40)
@given(
    speed=st.floats(1e7, 1e10),
    fixed_s=st.floats(0.0, 0.1),
    loads=st.lists(st.integers(LARGE_BYTES, 16 * GB), min_size=15, max_size=15),
)
def test_a_steady_tier_becomes_known(speed: float, fixed_s: float, loads: list[int]) -> None:
    """After fifteen large and fifteen small loads, the next load time is predicted within 20 to 25 %."""
    rates = TierModel()
    for count in loads:
        rates.observe({"nvme": count}, fixed_s + count / speed)
        rates.observe({"nvme": 1}, fixed_s + 1 / speed)
    wanted = fixed_s + loads[0] / speed
    assert 0.8 <= rates.load_time_s({"nvme": loads[0]}) / wanted <= 1.25


@example([({"nvme": GB}, 5e-324)])
@given(st.lists(st.tuples(st.dictionaries(st.sampled_from(["host", "nvme", "store", "x"]), st.integers(-5, 10**12)),
                          st.floats(-1, 1e6))))  # fmt: skip
def test_no_load_makes_a_rate_absurd(loads: list[tuple[dict[str, int], float]]) -> None:
    """After any observations, predicted times are finite, not negative, and do not fall with more bytes."""
    rates = TierModel()
    for moved, seconds in loads:
        rates.observe(moved, seconds)
    for rate in rates.by_tier.values():
        assert 0 < rate.bytes_per_s < float("inf")
        assert 0 <= rate.fixed_s < float("inf")
    assert (
        rates.load_time_s({"nvme": GB})
        <= rates.load_time_s({"nvme": 2 * GB})
        <= rates.load_time_s({"nvme": 2 * GB, "store": 1})
    )


def test_an_agent_that_learned_nothing_is_told_from_one_that_did() -> None:
    """Negative control: without learning, a tier ten times slower than the guess is predicted ten times too fast."""
    slow = {"nvme": GB}
    slow_s = 10 * predict_load_s(INITIAL_SPEEDS, slow)
    fixed, learning = TierModel(), TierModel()
    learning.observe(slow, slow_s)
    assert slow_s / fixed.load_time_s(slow) > 5
    assert slow_s / learning.load_time_s(slow) < 1.1


def test_chunks_on_nvme_cost_less_to_reload() -> None:
    """Each chunk of a slab costs what a reload from its tier costs. Another tenant's files do not count."""
    cost = slab_reload_estimator(
        TierModel({"nvme": TierSpeed(1000.0, 0.5), "store": TierSpeed(10.0, 2.0)}), {("a", "near")}.__contains__
    )
    assert cost("a", [("near", 1000)]) == pytest.approx(1.5)
    assert cost("a", [("far", 10)]) == pytest.approx(3.0)
    assert cost("a", [("near", 1000), ("far", 10)]) == pytest.approx(4.0)
    assert cost("b", [("near", 1000)]) == pytest.approx(102.0)
    assert cost("a", []) == 0.0


def test_reload_cost_follows_observed_loads() -> None:
    """When the store becomes slow, files that are only there cost more to reload."""
    rates = TierModel()
    cost = file_reload_estimator(rates)
    before = cost(8 * MIB)
    for _ in range(20):
        rates.observe({"store": 64 * MIB}, 64.0)
    assert cost(8 * MIB) > 10 * before
