"""How fast a source is, from its transfers: all of them together, idle times aside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache.policy.line import Pace


def moved(pace: Pace, nbytes: int, begin: float, end: float) -> Pace:
    pace.end(pace.begin(begin), nbytes, end)
    return pace


def test_before_the_first() -> None:
    """Nothing is known, also while it is under way."""
    pace = Pace()
    assert pace.rate is None
    pace.begin(0.0)
    assert pace.rate is None


def test_one_after_another() -> None:
    """A hundred bytes in a second are a hundred a second; a refusal is not a slow transfer."""
    pace = moved(Pace(), 100, 0.0, 1.0)
    assert pace.rate == 100
    pace.end(pace.begin(5.0), 0, 9.0)
    assert pace.rate == 100


def test_idle_is_not_slow() -> None:
    """Time without transfers does not count."""
    assert moved(moved(Pace(), 100, 0.0, 1.0), 100, 60.0, 61.0).rate == 100


@pytest.mark.parametrize("apart_s", [0.0, 1e-6, 0.2], ids=["together", "all but together", "one by one"])
def test_abreast(apart_s: float) -> None:
    """Four that share a source of four hundred a second are told from a source of a hundred, however they end."""
    pace = Pace()
    begun = [pace.begin(0.0 + apart_s * number) for number in range(4)]
    for round_ in range(1, 20):
        for number in range(4):
            now = round_ + apart_s * number
            pace.end(begun[number], 100, now)
            begun[number] = pace.begin(now)
    assert pace.rate == pytest.approx(400, rel=0.05)


def test_it_follows() -> None:
    """What became slower is known after a few transfers."""
    pace = moved(Pace(), 1000, 0.0, 1.0)
    for second in range(2, 22):
        moved(pace, 10, second, second + 1.0)
    assert pace.rate is not None
    assert 10 < pace.rate < 12


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 10), st.booleans()), max_size=30))
def test_the_rate_is_sane(transfers: list[tuple[int, float, bool]]) -> None:
    """Whatever comes and fails, no rate is negative."""
    pace, now = Pace(), 0.0
    for nbytes, took_s, came in transfers:
        transfer = pace.begin(now)
        now += took_s
        pace.end(transfer, nbytes if came else 0, now)
        assert pace.rate is None or pace.rate >= 0
