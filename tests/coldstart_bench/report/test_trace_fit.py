"""A load that differs from its trace fails the claim of that figure, and each figure follows its definition."""

from random import Random

import msgspec
import pytest

from coldstart_bench.harness.arrivals import poisson
from coldstart_bench.report.trace_fit import (
    FigurePair,
    TraceFigures,
    TraceFit,
    TraceOutcome,
    apart,
    dispersion,
    distance,
    joint,
    judge,
    lengths,
    variation,
    weighted_mean,
)

SAME = list(range(1, 1001))
GOOD = TraceFit(
    requests=1000,
    prompt=lengths(SAME, SAME),
    output=lengths(SAME, SAME),
    joint=FigurePair(0.5, 0.5),
    variation=FigurePair(3.0, 3.1),
    dispersion=FigurePair(8.0, 8.1),
    tenants=2,
    largest=FigurePair(0.7, 0.7),
    apart=0.01,
    prefix=FigurePair(0.3, 0.3),
)
CAME = TraceOutcome(right=1000, unrecorded=0, p50_s=0.1, p99_s=0.2, lag_p99_s=0.001, codes={})


def test_distribution_distance_is_between_0_and_1() -> None:
    """The distance is 0 for equal samples, 1 for disjoint ones, 0.5 for half."""
    assert distance([1, 2, 3, 4], [4, 3, 2, 1]) == 0
    assert distance([1, 2], [3, 4]) == 1
    assert distance([1, 1, 2, 2], [2, 2, 2, 2]) == 0.5
    assert distance([], [1]) == 1


def test_rank_correlation_uses_ranks_alone() -> None:
    """Only ranks count. Independently drawn lengths have no correlation."""
    assert joint([(1, 10), (2, 20), (3, 1000)]) == pytest.approx(1)
    assert joint([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert joint([(1, 5), (1, 5)]) is None
    assert joint([(1, 1)]) is None
    chance = Random(1)
    drawn = [(chance.randrange(1000), chance.randrange(1000)) for _ in range(2000)]
    assert joint(drawn) == pytest.approx(0, abs=0.1)


def test_bursts_raise_variation_and_dispersion() -> None:
    """Independent arrivals have 1 for both, bursts more, a clock less. Too few arrivals give None."""
    independent = poisson(50, 200, Random(1))
    assert variation(independent) == pytest.approx(1, abs=0.05)
    assert dispersion(independent) == pytest.approx(1, abs=0.3)
    clock = list(range(0, 20_000_000, 20_000))
    assert variation(clock) == 0
    assert dispersion(clock) == pytest.approx(0, abs=0.05)
    burst = [at // 10_000_000 * 10_000_000 + at % 1000 for at in independent]
    assert (dispersion(burst) or 0) > 20
    assert (variation(clock[:10]), variation([5] * 100), dispersion([]), dispersion([1, 2])) == (None, None, None, None)


def test_share_distance_and_weighted_mean() -> None:
    """The distance is half the sum of differences. The mean ignores unknown values."""
    assert apart([0.5, 0.5], [1.0, 0.0]) == 0.5
    assert weighted_mean([1.0, None, 4.0], [1, 5, 2]) == 3.0
    assert weighted_mean([None], [1]) is None


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        pytest.param({}, [], id="all holds"),
        pytest.param({"prompt": lengths(SAME, [9] * 10)}, ["distance of prompts'"], id="prompts of one length"),
        pytest.param({"output": lengths(SAME, SAME[:500])}, ["distance of outputs'"], id="outputs without their tail"),
        pytest.param({"joint": FigurePair(0.5, 0.0)}, ["difference of the lengths'"], id="lengths drawn apart"),
        pytest.param({"variation": FigurePair(3.0, 1.0)}, ["gaps' variation"], id="no bursts"),
        pytest.param({"dispersion": FigurePair(8.0, 4.0)}, ["requests a second"], id="a loop that does not keep up"),
        pytest.param({"apart": 0.3}, ["distance of tenants'"], id="equal tenants"),
        pytest.param({"prefix": FigurePair(0.3, 0.0)}, ["difference of the share"], id="no prefixes"),
    ],
)
def test_bad_figure_fails_its_claim_alone(changed: dict[str, object], want: list[str]) -> None:
    found = [
        one.claim for one in judge(TraceFigures(msgspec.structs.replace(GOOD, **changed), CAME)) if one.passed is False
    ]
    assert len(found) == len(want)
    assert all(claim.startswith(start) for claim, start in zip(found, want, strict=True))


def test_wrong_and_unrecorded_answers_are_counted() -> None:
    """A wrong answer, a missing record and a surplus record fail their claims."""
    came = msgspec.structs.replace(CAME, right=999, unrecorded=1)
    red = [one.claim for one in judge(TraceFigures(GOOD, came)) if one.passed is False]
    assert red == ["requests that were not answered right", "answers without a usage record"]
    twice = judge(TraceFigures(GOOD, msgspec.structs.replace(CAME, unrecorded=-1)))
    assert [one.claim for one in twice if one.passed is False] == ["usage records beyond the answers"]
