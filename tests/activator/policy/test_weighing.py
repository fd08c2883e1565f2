"""What requests at once are reported as by the tokens that are left of them: never less than they are."""

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.policy.expected import Measured
from activator.policy.weighing import MOST, Inside, left, weighed

TEN = Measured(10.0, 1.0)  # tokens a second of a slot, as many as are estimated
HALF = Measured(10.0, 0.5)


@pytest.mark.parametrize(
    ("each", "share", "want"),
    [
        pytest.param(Inside(100, 0), 1.0, 100, id="all of what was estimated"),
        pytest.param(Inside(100, 30), 1.0, 70, id="what is not computed yet"),
        pytest.param(Inside(100, 30), 0.5, 20, id="of what such requests come to"),
        pytest.param(Inside(100, 80), 0.5, 0, id="one that took more is about to end"),
    ],
)
def test_left(each: Inside, share: float, want: float) -> None:
    """Tokens."""
    assert left(each, share) == want


@pytest.mark.parametrize(
    ("concurrency", "inside", "waiting", "measured", "backlog_s", "want"),
    [
        pytest.param(2.0, [Inside(9000, 0)] * 2, 0, TEN, 0, 2.0, id="by requests: off"),
        pytest.param(2.0, [Inside(9000, 0)] * 2, 2, None, 10, 2.0, id="by requests: nothing was measured"),
        pytest.param(2.0, [Inside(100, 0)] * 2, 0, TEN, 10, 2.0, id="each is as long as one may be"),
        pytest.param(2.0, [Inside(200, 0)] * 2, 0, TEN, 10, 4.0, id="each is two of those"),
        pytest.param(2.0, [Inside(200, 100)] * 2, 0, TEN, 10, 2.0, id="half of each is over"),
        pytest.param(2.0, [Inside(200, 0)] * 2, 0, HALF, 10, 2.0, id="half of it is never asked for"),
        pytest.param(20.0, [Inside(10, 0)] * 20, 0, TEN, 10, 20.0, id="short ones are requests all the same"),
        pytest.param(2.0, [Inside(20_000, 0), Inside(20, 0)], 0, TEN, 10, 200.2, id="a long one beside a short one"),
        pytest.param(0.3, [Inside(10, 0)], 1, TEN, 10, 1.0, id="one that has just come, and waits"),
        pytest.param(0.3, [Inside(10, 0)], 0, TEN, 10, 0.3, id="one that has just come, and runs"),
        pytest.param(0.3, [], 1, TEN, 10, 1.0, id="one that waits, of which nothing is known"),
        pytest.param(0.0, [], 0, TEN, 10, 0.0, id="nobody"),
        pytest.param(1.0, [Inside(1 << 40, 0)], 1, TEN, 0.001, MOST, id="no more than a fleet serves"),
    ],
)
def test_weighed(
    concurrency: float, inside: list[Inside], waiting: int, measured: Measured | None, backlog_s: float, want: float
) -> None:
    """Requests at once: tokens over ten a second of a slot, and the seconds that count as one."""
    assert weighed(concurrency, inside, waiting, measured, backlog_s) == pytest.approx(want)


_SOME = st.builds(Inside, st.integers(1, 1 << 40), st.integers(0, 1 << 40))
_MEASURED = st.builds(Measured, st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))


@given(
    concurrency=st.floats(0, 1e6), inside=st.lists(_SOME, max_size=20), waiting=st.integers(0, 3),
    measured=st.none() | _MEASURED, backlog_s=st.just(0.0) | st.floats(1e-6, 3600), more=_SOME,
)  # fmt: skip
def test_bounds(
    concurrency: float, inside: list[Inside], waiting: int, measured: Measured | None, backlog_s: float, more: Inside
) -> None:
    """A finite number, never under the requests at once, nor under 1 while one waits; more to do is never less; itself
    where it is off or nothing is known.
    """
    found = weighed(concurrency, inside, waiting, measured, backlog_s)
    if measured is None or backlog_s == 0:
        assert found == concurrency
        return
    assert isfinite(found)
    assert max(concurrency, 1.0 if waiting else 0.0) <= found <= max(concurrency, MOST, 1.0)
    assert weighed(concurrency, [*inside, more], waiting, measured, backlog_s) >= found
    longer = [Inside(each.estimated + more.estimated, each.computed) for each in inside]
    assert weighed(concurrency, longer, waiting, measured, backlog_s) >= found
    further = [Inside(each.estimated, each.computed + more.computed) for each in inside]
    assert weighed(concurrency, further, waiting, measured, backlog_s) <= found
    assert weighed(concurrency, inside, waiting, measured, backlog_s / 2) >= found, "a shorter backlog asks for more"


@given(target=st.integers(1, 1000), speed=st.floats(0.1, 1000), backlog_s=st.floats(0.1, 1000), share=st.floats(0.1, 1))
def test_a_replica_at_its_target_has_so_many_seconds_before_it(
    target: int, speed: float, backlog_s: float, share: float
) -> None:
    """What `target` slots compute in `backlog_s` is reported as `target`: what Knative takes for one replica at it."""
    tokens = target * speed * backlog_s
    inside = [Inside(1_000_000, 0)] * int(tokens // (1_000_000 * share))
    rest = tokens - len(inside) * 1_000_000 * share
    by = weighed(0.0, [*inside, Inside(round(rest / share), 0)], 0, Measured(speed, share), backlog_s)
    assert by == pytest.approx(target, abs=1 / (speed * backlog_s) + 1e-6)
