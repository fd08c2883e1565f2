"""Generated arrivals have the requested rate and burstiness, and repeat with the same random source."""

import statistics
from itertools import pairwise
from random import Random

import pytest

from coldstart_bench.harness.arrivals import at_once, constant, poisson, renewal, replayed, weibull_shape


def test_deterministic_arrivals_are_exact() -> None:
    assert at_once(3) == [0, 0, 0]
    assert constant(4, 1) == [0, 250_000, 500_000, 750_000]
    assert constant(0.5, 1) == []
    assert replayed([10.0, 10.5, 12.0], 2.0) == [0, 250_000, 1_000_000]
    assert replayed([], 2.0) == []


@pytest.mark.parametrize(("pattern", "cv"), [("Gamma", 0.5), ("Gamma", 3.0), ("Weibull", 0.5), ("Weibull", 2.0)])
def test_a_renewal_has_its_rate_and_its_variation(pattern: str, cv: float) -> None:
    """The rate and the coefficient of variation are right within the precision of 20,000 gaps."""
    found = renewal(100, cv, pattern, 200, Random(1))
    gaps = [after - before for before, after in pairwise(found)]
    assert found == sorted(found)
    assert len(found) == pytest.approx(20_000, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)


def test_chance_is_an_argument() -> None:
    """The same seed gives the same arrivals, and another seed gives others."""
    assert poisson(50, 10, Random(7)) == poisson(50, 10, Random(7))
    assert poisson(50, 10, Random(7)) != poisson(50, 10, Random(8))


def test_impossible_arrivals_are_refused() -> None:
    """A rate of 0 gives no arrivals, and an unknown pattern is refused by name."""
    assert renewal(0, 1, "Gamma", 10, Random(1)) == []
    with pytest.raises(ValueError, match="Pareto: must be Gamma or Weibull"):
        renewal(1, 1, "Pareto", 10, Random(1))


def test_an_exponential_distribution_is_a_weibull_distribution() -> None:
    assert weibull_shape(1.0) == pytest.approx(1.0)
