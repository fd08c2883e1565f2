"""A token bucket keeps its rate and size in any order of takes. Requests wait no longer than needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.token_bucket import TokenBucket

UNIT_S, SIZE = 0.01, 25.0


@pytest.mark.parametrize(
    ("taken", "waits"),
    [
        pytest.param([(0.0, 25)], [0.0], id="a full bucket gives its size at once"),
        pytest.param([(0.0, 25), (0.0, 10)], [0.0, 0.1], id="an empty bucket gives units at its rate"),
        pytest.param([(0.0, 25), (0.1, 10)], [0.0, 0.0], id="units that were added meanwhile are given at once"),
        pytest.param([(0.0, 25), (0.099, 10)], [0.0, 0.001], id="only those units are given at once"),
        pytest.param([(0.0, 25), (9.0, 26)], [0.0, 0.01], id="an unused bucket never exceeds its size"),
        pytest.param([(0.0, 125)], [1.0], id="more than the size waits for the excess"),
        pytest.param([(0.0, 25), (0.0, 10), (0.0, 10)], [0.0, 0.1, 0.2], id="a later taker waits behind the others"),
        pytest.param([(0.0, 0)], [0.0], id="nothing costs nothing"),
        pytest.param([(5.0, 25), (4.0, 10)], [0.0, 1.1], id="a clock that steps back brings no units"),
    ],
)
def test_bucket_waits_until_its_debt_is_paid(taken: list[tuple[float, int]], waits: list[float]) -> None:
    """A request for more units than there are waits until the bucket has made up the debt. Pairs are (time, units)."""
    bucket, found = TokenBucket(), []
    for now_s, units in taken:
        before_s = bucket.wait_s(units, SIZE, UNIT_S, now_s)
        bucket.take(units, UNIT_S, now_s)
        assert bucket.wait_s(0, SIZE, UNIT_S, now_s) == pytest.approx(before_s)
        found.append(before_s)
    assert found == pytest.approx(waits)


def test_rate_and_size_change_at_any_time() -> None:
    """The state is a time: a bucket that lacks 30 units at one per second lacks 300 at ten per second."""
    bucket = TokenBucket()
    bucket.take(30, 1.0, 0.0)
    assert [bucket.missing(unit_s, 0.0) for unit_s in (1.0, 0.1, 10.0)] == pytest.approx([30, 300, 3])
    assert bucket.wait_s(1, 30, 1.0, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 60, 1.0, 0.0) == 0.0


@given(
    per_s=st.integers(1, 1000),
    waits=st.booleans(),
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 100)), min_size=1, max_size=50),
)
def test_bucket_never_exceeds_its_rate(per_s: int, waits: bool, steps: list[tuple[float, int]]) -> None:
    """Between any two takes, the units taken fit the elapsed time plus the size. Each request either waits for its
    units, or gives up and takes nothing."""
    bucket, size, now_s, taken = TokenBucket(), per_s / 4, 0.0, []
    for pause_s, units in steps:
        now_s += pause_s
        wait_s = bucket.wait_s(units, size, 1 / per_s, now_s)
        if wait_s and not waits:
            continue
        bucket.take(units, 1 / per_s, now_s)
        now_s += wait_s
        taken.append((now_s, units))
    for first in range(len(taken)):
        total = 0
        for at_s, units in taken[first + 1 :]:
            total += units
            assert total <= per_s * (at_s - taken[first][0]) + size + 1e-5
