"""Min and max scale hold. An idle version loses its last replica only after window and grace, and not while it starts.

The table follows knative/serving's tests (pkg/reconciler/autoscaling/kpa/scaler_test.go, kpa_test.go).
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.scale_to_zero import (
    Activity,
    Apply,
    Deactivate,
    Hold,
    IdleFacts,
    IdleSpec,
    ScaleDecision,
    active_threshold,
    check_local_window,
    clamp_scale,
    decide,
    next_activity,
)
from kelvin.contracts.errors import InvalidRequest, Refused

NOW = 100_000.0
WINDOW, GRACE = 60.0, 60.0
ACTIVE, INACTIVE, ACTIVATING = Activity.ACTIVE, Activity.INACTIVE, Activity.ACTIVATING


def spec(
    *,
    minimum: int = 0,
    most: int = 0,
    start: int = 1,
    to_zero: bool = True,
    reachable: bool = True,
) -> IdleSpec:
    return IdleSpec(
        min_scale=minimum,
        max_scale=most,
        initial_scale=start,
        stable_window_s=WINDOW,
        grace_s=GRACE,
        activation_timeout_s=150.0,
        to_zero=to_zero,
        reachable=reachable,
    )


def facts(
    desired: int,
    activity: Activity,
    lasted: float,
    *,
    initialized: bool = True,
) -> IdleFacts:
    return IdleFacts(
        desired=desired,
        activity=activity,
        since_s=NOW - lasted,
        initialized=initialized,
    )


@pytest.mark.parametrize(
    ("of", "seen", "want"),
    [
        pytest.param(spec(), facts(0, ACTIVE, 59), Apply(1), id="active, just before the end of the window: one stays"),
        pytest.param(spec(), facts(0, ACTIVE, 60), Deactivate(), id="active for the window: it turns inactive"),
        pytest.param(spec(), facts(0, INACTIVE, 60), Apply(0), id="inactive for the grace: the last one goes"),
        pytest.param(spec(), facts(0, INACTIVE, 59), Hold(0), id="just before the end of the grace"),
        pytest.param(spec(), facts(0, ACTIVATING, 75, initialized=False), Hold(-1), id="starting: wait for it"),
        pytest.param(spec(), facts(0, ACTIVATING, 150), Hold(-1), id="starting, exactly as long as it may take"),
        pytest.param(spec(), facts(0, ACTIVATING, 151), Apply(0), id="starting for too long: given up"),
        pytest.param(spec(minimum=2), facts(0, INACTIVE, 59), Apply(2), id="down to the minimum, before the grace"),
        pytest.param(spec(minimum=2), facts(0, INACTIVE, 60), Apply(2), id="down to the minimum, after the grace"),
        pytest.param(spec(reachable=False), facts(0, INACTIVE, 59), Hold(0), id="unreachable: the grace holds"),
        pytest.param(spec(minimum=2, reachable=False), facts(0, INACTIVE, 60), Apply(0), id="unreachable: no minimum"),
        pytest.param(spec(), facts(10, ACTIVE, 5), Apply(10), id="up to the desired scale"),
        pytest.param(spec(most=8), facts(10, ACTIVE, 5), Apply(8), id="up to the maximum"),
        pytest.param(spec(), facts(10, INACTIVE, 30), Apply(10), id="up from inactive"),
        pytest.param(spec(), facts(-1, INACTIVE, 0), Hold(-1), id="no data yet, inactive: unchanged"),
        pytest.param(spec(), facts(-1, ACTIVE, 0), Hold(-1), id="no data yet, active: unchanged"),
        pytest.param(
            spec(start=2), facts(0, ACTIVE, 120), Deactivate(), id="the initial scale was reached once: it is over"
        ),
        pytest.param(
            spec(start=2), facts(1, ACTIVATING, 0, initialized=False), Apply(2), id="the initial scale comes first"
        ),
        pytest.param(
            spec(start=5), facts(-1, ACTIVATING, 0, initialized=False), Apply(5), id="even before there is data"
        ),
        pytest.param(
            spec(start=2, reachable=False), facts(0, ACTIVE, 30, initialized=False), Apply(1),
            id="unreachable: no initial scale",
        ),
        pytest.param(spec(start=0), facts(0, INACTIVE, 0), Hold(0), id="an initial scale of zero waits, too"),
        pytest.param(spec(to_zero=False), facts(0, ACTIVE, 600), Apply(1), id="never to zero: one stays"),
        pytest.param(spec(to_zero=False, minimum=2), facts(0, ACTIVE, 600), Apply(2), id="never to zero, minimum two"),
        pytest.param(spec(to_zero=False), facts(-1, ACTIVE, 600), Hold(-1), id="never to zero, no data yet"),
    ],
)  # fmt: skip
def test_decide(of: IdleSpec, seen: IdleFacts, want: ScaleDecision) -> None:
    assert decide(of, seen, NOW) == want


@pytest.mark.parametrize(
    ("before", "want", "ready", "threshold", "after"),
    [
        pytest.param(ACTIVE, 0, 3, 1, INACTIVE, id="nothing wanted"),
        pytest.param(ACTIVATING, 0, 0, 1, INACTIVE, id="given up"),
        pytest.param(INACTIVE, 1, 0, 1, ACTIVATING, id="wanted, none ready"),
        pytest.param(ACTIVE, 1, 0, 1, ACTIVATING, id="wanted, the last one was lost"),
        pytest.param(INACTIVE, 1, 1, 1, ACTIVE, id="wanted and ready"),
        pytest.param(ACTIVATING, 2, 1, 2, ACTIVATING, id="wanted, not enough ready"),
        pytest.param(INACTIVE, -1, 0, 1, INACTIVE, id="unknown, inactive"),
        pytest.param(INACTIVE, -1, 1, 1, INACTIVE, id="unknown, inactive, one ready"),
        pytest.param(ACTIVATING, -1, 0, 1, ACTIVATING, id="unknown, starting"),
        pytest.param(ACTIVE, -1, 0, 1, ACTIVATING, id="unknown, was active, lost it"),
        pytest.param(ACTIVATING, -1, 1, 1, ACTIVE, id="unknown, starting, ready"),
        pytest.param(ACTIVE, -1, 1, 1, ACTIVE, id="unknown, active, ready"),
        pytest.param(ACTIVATING, -1, 0, 0, INACTIVE, id="an initial scale of zero starts inactive"),
    ],
)
def test_next_activity(before: Activity, want: int, ready: int, threshold: int, after: Activity) -> None:
    """The next activity follows from the desired scale and the ready replicas."""
    assert next_activity(before, want, ready, threshold) is after


@pytest.mark.parametrize(
    ("of", "initialized", "want"),
    [
        pytest.param(spec(start=3), False, 3, id="the initial scale, until it was reached"),
        pytest.param(spec(start=3), True, 1, id="then one"),
        pytest.param(spec(start=0), False, 0, id="an initial scale of zero"),
        pytest.param(spec(start=3, minimum=5), False, 5, id="the minimum, if it is larger"),
        pytest.param(spec(minimum=5), True, 5, id="the minimum always holds"),
        pytest.param(spec(minimum=5, reachable=False), True, 1, id="no minimum for an unreachable version"),
    ],
)
def test_active_threshold(of: IdleSpec, initialized: bool, want: int) -> None:
    """The threshold is the number of ready replicas that makes a version active."""
    assert active_threshold(of, initialized=initialized) == want


SPECS = st.builds(
    IdleSpec,
    min_scale=st.integers(min_value=0, max_value=3),
    max_scale=st.sampled_from([0, 3, 8]),
    initial_scale=st.integers(min_value=0, max_value=3),
    stable_window_s=st.floats(min_value=6, max_value=60),
    grace_s=st.floats(min_value=0, max_value=60),
    to_zero=st.booleans(),
    reachable=st.booleans(),
)


@given(SPECS, st.integers(min_value=-1, max_value=20), st.booleans())
def test_scale_is_clamped_to_min_and_max(of: IdleSpec, desired: int, initialized: bool) -> None:
    """A larger desired scale never gives a smaller result."""
    got = clamp_scale(of, desired, initialized=initialized)
    assert got >= (of.min_scale if of.reachable else -1)
    assert not of.max_scale or got <= max(of.max_scale, of.min_scale, of.initial_scale)
    assert got <= clamp_scale(of, desired + 1, initialized=initialized)


@given(
    SPECS, st.lists(st.tuples(st.sampled_from([-1, 0, 0, 0, 1, 4]), st.integers(min_value=0, max_value=3)), max_size=60)
)
def test_zero_is_reached_only_through_window_and_grace(of: IdleSpec, steps: list[tuple[int, int]]) -> None:
    """For any series of desired scales and ready replicas, an active version reaches zero only after both."""
    activity, since, now, initialized, last_active = ACTIVATING, 0.0, 0.0, False, None
    for desired, ready in steps:
        now += 2.0
        seen = IdleFacts(desired=desired, activity=activity, since_s=since, initialized=initialized)
        outcome = decide(of, seen, now)
        if isinstance(outcome, Apply) and outcome.want == 0:
            assert of.to_zero
            assert activity is not ACTIVE
            if activity is INACTIVE and last_active is not None:
                assert now - since >= of.grace_s
        threshold = active_threshold(of, initialized=initialized)
        initialized = initialized or ready >= threshold
        after = next_activity(activity, outcome.want, ready, threshold)
        if after is not activity:
            if activity is ACTIVE and after is INACTIVE:
                assert now - since >= of.stable_window_s or threshold == 0
                last_active = now
            activity, since = after, now


@pytest.mark.parametrize(
    "window_s",
    [pytest.param(6.0, id="the shortest"), pytest.param(60.0, id="a minute"), pytest.param(3600.0, id="the longest")],
)
def test_valid_local_windows_are_accepted(window_s: float) -> None:
    assert check_local_window(window_s) == window_s


@pytest.mark.parametrize(
    "window_s",
    [
        pytest.param(5.0, id="too short"),
        pytest.param(6.5, id="not whole"),
        pytest.param(3601.0, id="too long"),
        pytest.param(float("nan"), id="not a number"),
    ],
)
def test_invalid_local_windows_are_refused(window_s: float) -> None:
    """The error has the value and the rule."""
    with pytest.raises(Refused) as caught:
        check_local_window(window_s)
    assert caught.value.failure == InvalidRequest("window_s", f"{window_s:g}", "must be whole seconds from 6 to 3600")


def test_defaults_are_knative_s() -> None:
    """A deactivation wants zero replicas."""
    of = IdleSpec()
    assert (of.min_scale, of.max_scale, of.initial_scale, of.to_zero, of.reachable) == (0, 0, 1, True, True)
    assert (of.stable_window_s, of.grace_s, of.activation_timeout_s) == (60.0, 30.0, 630.0)
    assert Deactivate().want == 0
