"""What it costs to have bytes again follows the rates that were learned."""

import pytest

from weightcache.policy.rates import Rate, Rates, file_reload, slab_reload

MIB = 1 << 20


def test_what_lies_on_the_disk_costs_less() -> None:
    """A slab's chunks, each from where it lies; another tenant's files are not ours."""
    cost = slab_reload(Rates({"nvme": Rate(1000.0, 0.5), "store": Rate(10.0, 2.0)}), {("a", "near")}.__contains__)
    assert cost("a", [("near", 1000)]) == pytest.approx(1.5)
    assert cost("a", [("far", 10)]) == pytest.approx(3.0)
    assert cost("a", [("near", 1000), ("far", 10)]) == pytest.approx(4.0)
    assert cost("b", [("near", 1000)]) == pytest.approx(102.0)
    assert cost("a", []) == 0.0


def test_it_follows_what_loads_took() -> None:
    """A store that becomes slow makes what lies in it alone worth more."""
    rates = Rates()
    cost = file_reload(rates)
    before = cost(8 * MIB)
    for _ in range(20):
        rates.observe({"store": 64 * MIB}, 64.0)
    assert cost(8 * MIB) > 10 * before
