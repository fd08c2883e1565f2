"""What loads teach of tiers: a steady tier is known after a few, whatever their sizes; bad figures do no harm."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightcache.fetch.tier_model_policy import (
    LARGE_BYTES,
    UNKNOWN,
    Rate,
    TierModel,
    file_reload,
    predict_load_s,
    slab_reload,
)

GB = 10**9
MIB = 1 << 20


def test_a_guess_is_used_until_something_is_known() -> None:
    """Bytes of the host's tier, and of none, take no time."""
    rates = TierModel({"nvme": Rate(1e9, 0.5)})
    assert rates.load_time_s({"host": 5 * GB, "nvme": 2 * GB}) == pytest.approx(2.5)
    assert rates.load_time_s({"host": 5 * GB, "nvme": 0}) == 0.0
    assert rates.by_tier["nvme"].loads == 0


def test_the_first_load_counts_for_all() -> None:
    """A guess is not averaged with what was measured."""
    rates = TierModel({"nvme": Rate(1e9, 0.0)})
    rates.observe({"nvme": GB}, 4.0)
    assert rates.by_tier["nvme"] == Rate(pytest.approx(0.25e9), 0.0, 1, 1)  # type: ignore[arg-type]


def test_small_loads_teach_what_is_fixed_and_large_ones_the_rate() -> None:
    """A small model's load says nothing of gigabytes."""
    rates = TierModel({"nvme": Rate(1e9, 0.01)})
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
    """Large and small loads in turn: after fifteen of each the next one is foretold within a fifth."""
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
    """Whatever is observed, times stay finite and not negative, and more bytes never take less."""
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
    """Negative control: with the guesses alone, a tier that is ten times slower is foretold ten times too fast."""
    slow = {"nvme": GB}
    took_s = 10 * predict_load_s(UNKNOWN, slow)
    deaf, learning = TierModel(), TierModel()
    learning.observe(slow, took_s)
    assert took_s / deaf.load_time_s(slow) > 5
    assert took_s / learning.load_time_s(slow) < 1.1


def test_what_lies_on_the_disk_costs_less() -> None:
    """A slab's chunks, each from where it lies; another tenant's files are not ours."""
    cost = slab_reload(TierModel({"nvme": Rate(1000.0, 0.5), "store": Rate(10.0, 2.0)}), {("a", "near")}.__contains__)
    assert cost("a", [("near", 1000)]) == pytest.approx(1.5)
    assert cost("a", [("far", 10)]) == pytest.approx(3.0)
    assert cost("a", [("near", 1000), ("far", 10)]) == pytest.approx(4.0)
    assert cost("b", [("near", 1000)]) == pytest.approx(102.0)
    assert cost("a", []) == 0.0


def test_it_follows_what_loads_took() -> None:
    """A store that becomes slow makes what lies in it alone worth more."""
    rates = TierModel()
    cost = file_reload(rates)
    before = cost(8 * MIB)
    for _ in range(20):
        rates.observe({"store": 64 * MIB}, 64.0)
    assert cost(8 * MIB) > 10 * before
