"""When a read is late, and how many may be hedged: tables, properties, and simulated read times."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache.sources.policy.read_hedging import MIN_SAMPLES, WINDOW, HedgeRule, ReadHedging

MIB = 1 << 20
RULE = HedgeRule()


def after_reads(*seconds: float, nbytes: int = MIB, rule: HedgeRule = RULE) -> ReadHedging:
    hedging = ReadHedging(rule)
    for each in seconds:
        hedging.record_read(nbytes, each)
    return hedging


@pytest.mark.parametrize(
    ("hedging", "nbytes", "want"),
    [
        pytest.param(after_reads(), MIB, None, id="no limit without reads"),
        pytest.param(after_reads(*[1.0] * (MIN_SAMPLES - 1)), MIB, None, id="no limit after few reads"),
        pytest.param(after_reads(*[1.0] * MIN_SAMPLES), MIB, 2.0, id="twice the usual time"),
        pytest.param(after_reads(*[1.0] * MIN_SAMPLES), MIB + 1, 2.0, id="reads of nearly the same size count"),
        pytest.param(after_reads(*[1.0] * MIN_SAMPLES), 4 * MIB, None, id="reads of another size do not count"),
        pytest.param(after_reads(*[0.001] * MIN_SAMPLES), MIB, 0.1, id="at least the floor"),
        pytest.param(after_reads(*[0.1] * 96, *[9.0] * 4), MIB, 0.2, id="a few slow reads do not count"),
        pytest.param(after_reads(*[0.1] * 90, *[9.0] * 10), MIB, 18.0, id="a tenth of slow reads counts"),
        pytest.param(after_reads(*[9.0] * WINDOW, *[0.1] * WINDOW), MIB, 0.2, id="old reads are forgotten"),
    ],
)
def test_late_read_threshold(hedging: ReadHedging, nbytes: int, want: float | None) -> None:
    """A read is late after twice the usual time for its size, if enough reads of that size were seen."""
    assert hedging.begin_read(nbytes) == (None if want is None else pytest.approx(want))


def test_hedge_budget_is_bounded() -> None:
    """A twentieth of the reads may be hedged, eight hedges may be saved up, and four may run at once."""
    hedging = ReadHedging(RULE)
    assert not hedging.try_hedge()
    for _ in range(21):
        hedging.begin_read(MIB)
    assert hedging.try_hedge()
    assert not hedging.try_hedge()
    hedging.end_hedge()
    for _ in range(10_000):
        hedging.begin_read(MIB)
    assert [hedging.try_hedge() for _ in range(5)] == [True, True, True, True, False]
    for _ in range(4):
        hedging.end_hedge()
    assert [hedging.try_hedge() for _ in range(5)] == [True, True, True, True, False]
    for _ in range(4):
        hedging.end_hedge()
    assert not hedging.try_hedge()


def test_zero_share_never_hedges() -> None:
    hedging = ReadHedging(HedgeRule(share=0.0))
    for _ in range(1000):
        hedging.begin_read(MIB)
    assert not hedging.try_hedge()


@given(
    share=st.floats(0.0, 0.5), steps=st.lists(st.sampled_from(["began", "hedge", "ended"]), min_size=1, max_size=300)
)
def test_hedges_never_exceed_their_share(share: float, steps: list[str]) -> None:
    """At any moment, hedges stay within the share of all reads so far and within the concurrency limit."""
    hedging = ReadHedging(HedgeRule(share=share))
    reads = hedges = running = 0
    for step in steps:
        if step == "began":
            hedging.begin_read(MIB)
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
    """Simulate sequential reads of these durations, with hedges of 0.05 s. Return durations and number of hedges."""
    durations, hedges = [], 0
    for number in range(reads):
        late, alone = hedging.begin_read(MIB), seconds(number)
        if late is not None and alone > late and hedging.try_hedge():
            hedges += 1
            alone = min(alone, late + 0.05)
            hedging.end_hedge()
        hedging.record_read(MIB, alone)
        durations.append(alone)
    return durations, hedges


def test_hedges_cut_off_the_slowest_reads() -> None:
    """One read in a hundred takes 5 s. With hedges none takes a second, and without hedges all of them take 5 s."""
    source = random.Random(5)
    slow = {n for n in range(100, 2000) if source.random() < 0.01}
    durations, hedges = simulate(ReadHedging(RULE), lambda n: 5.0 if n in slow else 0.05, 2000)
    assert len(slow) > 10
    assert hedges == len(slow)
    assert max(durations) < 1.0
    durations, _ = simulate(ReadHedging(HedgeRule(share=0.0)), lambda n: 5.0 if n in slow else 0.05, 2000)
    assert sum(each == 5.0 for each in durations) == len(slow)


def test_slow_store_raises_the_limit() -> None:
    """When all reads become slow, the lateness limit follows, and few are hedged."""
    _, hedges = simulate(ReadHedging(RULE), lambda n: 0.05 if n < 500 else 5.0, 2000)
    assert hedges <= 40
