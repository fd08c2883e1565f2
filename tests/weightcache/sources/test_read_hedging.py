"""When a read is late, and the budget of second ones: tables, properties, and a store of made-up times."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache.sources.policy.read_hedging import MIN_SAMPLES, WINDOW, HedgeRule, ReadHedging

MIB = 1 << 20
RULE = HedgeRule()


def seen(*seconds: float, nbytes: int = MIB, rule: HedgeRule = RULE) -> ReadHedging:
    hedging = ReadHedging(rule)
    for each in seconds:
        hedging.record_read(nbytes, each)
    return hedging


@pytest.mark.parametrize(
    ("hedging", "nbytes", "want"),
    [
        pytest.param(seen(), MIB, None, id="nothing is known at the start"),
        pytest.param(seen(*[1.0] * (MIN_SAMPLES - 1)), MIB, None, id="nor from a few"),
        pytest.param(seen(*[1.0] * MIN_SAMPLES), MIB, 2.0, id="twice of what they take"),
        pytest.param(seen(*[1.0] * MIN_SAMPLES), MIB + 1, 2.0, id="those of nearly the same size"),
        pytest.param(seen(*[1.0] * MIN_SAMPLES), 4 * MIB, None, id="not those of another"),
        pytest.param(seen(*[0.001] * MIN_SAMPLES), MIB, 0.1, id="never at once"),
        pytest.param(seen(*[0.1] * 96, *[9.0] * 4), MIB, 0.2, id="a few slow ones are no rule"),
        pytest.param(seen(*[0.1] * 90, *[9.0] * 10), MIB, 18.0, id="a tenth is"),
        pytest.param(seen(*[9.0] * WINDOW, *[0.1] * WINDOW), MIB, 0.2, id="what is long ago is forgotten"),
    ],
)
def test_late_read_threshold(hedging: ReadHedging, nbytes: int, want: float | None) -> None:
    """After how long a read is asked again."""
    assert hedging.began(nbytes) == (None if want is None else pytest.approx(want))


def test_hedge_budget_is_bounded() -> None:
    """A twentieth of the reads, eight saved up, four at once."""
    hedging = ReadHedging(RULE)
    assert not hedging.try_hedge()
    for _ in range(21):
        hedging.began(MIB)
    assert hedging.try_hedge()
    assert not hedging.try_hedge()
    hedging.end_hedge()
    for _ in range(10_000):
        hedging.began(MIB)
    assert [hedging.try_hedge() for _ in range(5)] == [True, True, True, True, False]
    for _ in range(4):
        hedging.end_hedge()
    assert [hedging.try_hedge() for _ in range(5)] == [True, True, True, True, False]
    for _ in range(4):
        hedging.end_hedge()
    assert not hedging.try_hedge()


def test_zero_share_never_hedges() -> None:
    """A share of nothing asks nothing twice."""
    hedging = ReadHedging(HedgeRule(share=0.0))
    for _ in range(1000):
        hedging.began(MIB)
    assert not hedging.try_hedge()


@given(
    share=st.floats(0.0, 0.5), steps=st.lists(st.sampled_from(["began", "hedge", "ended"]), min_size=1, max_size=300)
)
def test_never_more_than_the_share(share: float, steps: list[str]) -> None:
    """At any moment: of all reads so far, and of those under way."""
    hedging = ReadHedging(HedgeRule(share=share))
    reads = hedges = running = 0
    for step in steps:
        if step == "began":
            hedging.began(MIB)
            reads += 1
        elif step == "hedge" and hedging.try_hedge():
            hedges += 1
            running += 1
        elif step == "ended" and running:
            hedging.end_hedge()
            running -= 1
        assert hedges <= share * reads + 1e-9
        assert running <= RULE.at_once


def simulate(hedging: ReadHedging, seconds: Callable[[int], float], reads: int) -> tuple[list[float], int]:
    """One read after the other, each taking so long, a second one 0.05 s: how long each took, and how many second ones
    there were. Times are made up.
    """
    record_read, hedges = [], 0
    for number in range(reads):
        late, alone = hedging.began(MIB), seconds(number)
        if late is not None and alone > late and hedging.try_hedge():
            hedges += 1
            alone = min(alone, late + 0.05)
            hedging.end_hedge()
        hedging.record_read(MIB, alone)
        record_read.append(alone)
    return record_read, hedges


def test_the_slowest_are_cut_off() -> None:
    """One in a hundred takes 5 s: with hedges hardly any does; without them, all of those do."""
    source = random.Random(5)
    slow = {n for n in range(100, 2000) if source.random() < 0.01}
    record_read, hedges = simulate(ReadHedging(RULE), lambda n: 5.0 if n in slow else 0.05, 2000)
    assert len(slow) > 10
    assert hedges == len(slow)
    assert max(record_read) < 1.0
    record_read, _ = simulate(ReadHedging(HedgeRule(share=0.0)), lambda n: 5.0 if n in slow else 0.05, 2000)
    assert sum(each == 5.0 for each in record_read) == len(slow)


def test_a_store_that_becomes_slow_altogether() -> None:
    """The limit follows, and few are asked twice; never more than the share."""
    _, hedges = simulate(ReadHedging(RULE), lambda n: 0.05 if n < 500 else 5.0, 2000)
    assert hedges <= 40
