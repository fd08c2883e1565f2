"""How long until a pod is asked again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.policy.proving import pause_s


@pytest.mark.parametrize(
    ("asked_s", "want_s"),
    [
        pytest.param(0.0, 0.025, id="at first"),
        pytest.param(1.0, 0.025, id="a short start"),
        pytest.param(2.0, 0.04, id="a fiftieth of a longer one"),
        pytest.param(30.0, 0.6, id="and of a long one"),
        pytest.param(3600.0, 1.0, id="once a second, however long"),
    ],
)
def test_pauses(asked_s: float, want_s: float) -> None:
    """By how long it has been asked."""
    assert pause_s(asked_s) == pytest.approx(want_s)


@given(st.floats(0.0, 600.0))
def test_a_start_is_seen_to_be_over_soon(ready_s: float) -> None:
    """Whenever it is ready: within 25 ms or 2 % of the start, and of ten minutes' asking there are few."""
    at_s, asked = 0.0, 1
    while at_s < ready_s:
        at_s, asked = at_s + pause_s(at_s), asked + 1
    assert at_s - ready_s <= max(0.025, 0.02 * ready_s) + 1e-9
    assert asked <= 900
