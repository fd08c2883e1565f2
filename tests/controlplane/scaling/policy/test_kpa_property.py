"""KPA invariants for any series of observations."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.kpa import ScalingSpec, decide, initial_state
from tests.controlplane.scaling.policy.test_kpa import seen

LOADS = st.floats(min_value=0, max_value=10_000)
SPECS = st.builds(
    ScalingSpec,
    target_value=st.floats(min_value=0.01, max_value=500),
    total_value=st.floats(min_value=0.01, max_value=1000),
    target_burst_capacity=st.sampled_from([-1.0, 0.0, 7.0, 211.0]),
    panic_threshold=st.floats(min_value=1.1, max_value=10),
    max_scale_up_rate=st.floats(min_value=1.01, max_value=1000),
    max_scale_down_rate=st.floats(min_value=1.01, max_value=100),
    stable_window_s=st.integers(min_value=6, max_value=120).map(float),
    scale_down_delay_s=st.sampled_from([0.0, 2.0, 7.0, 60.0]),
    activation_scale=st.sampled_from([0, 1, 2, 5]),
    reachable=st.booleans(),
)
STEPS = st.lists(
    st.tuples(LOADS, LOADS, st.integers(min_value=0, max_value=200), st.floats(min_value=0.1, max_value=70)),
    max_size=30,
)


@given(SPECS, STEPS, st.integers(min_value=0, max_value=20))
def test_invariants_hold_for_any_series(
    of: ScalingSpec, steps: list[tuple[float, float, int, float]], ready: int
) -> None:
    """The scale never falls in panic. It stays within the rates, the activation scale and the held maximum. The state
    is bounded.
    """
    state, now = initial_state(ready, 0.0, of.scale_down_delay_s), 0.0
    for stable, panic, pods, passed in steps:
        now += passed
        before = state
        held = max([state.max_panic_pods, *(wish for _, wish in state.delay)])
        decision = decide(of, seen(stable, panic, pods), state, now)
        assert decision.valid
        assert decision.desired >= 0
        state = decision.state
        if state.panic_time_s is not None:
            # The delay may hold a larger scale from before the panic and release it. The panic's own maximum stays.
            assert decision.desired >= state.max_panic_pods
            assert state.max_panic_pods >= before.max_panic_pods
        most = max(of.max_scale_up_rate * max(1, pods) + 1, of.activation_scale, held)
        assert decision.desired <= most
        if of.reachable:
            assert decision.desired >= max(1, pods) // of.max_scale_down_rate
        assert len(state.delay) <= state.delay_buckets
        assert list(state.delay) == sorted(state.delay, key=lambda entry: (entry[0], -entry[1]))


@given(SPECS, LOADS, LOADS, LOADS, LOADS, st.integers(min_value=0, max_value=200))
def test_more_load_never_wants_fewer(
    of: ScalingSpec, stable: float, panic: float, more_stable: float, more_panic: float, pods: int
) -> None:
    """From the same state, more load in either window never gives a smaller scale."""
    state = initial_state(pods, 0.0, of.scale_down_delay_s)
    less = decide(of, seen(stable, panic, pods), state, 1.0)
    more = decide(of, seen(stable + more_stable, panic + more_panic, pods), state, 1.0)
    assert more.desired >= less.desired
    assert more.excess_burst_capacity <= less.excess_burst_capacity
