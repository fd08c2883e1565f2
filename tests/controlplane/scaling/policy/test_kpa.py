"""The KPA decides as Knative's: the same numbers for the same observations.

The numbers are from knative/serving's tests (pkg/autoscaler/scaling/autoscaler_test.go, aggregation/max/*_test.go,
reconciler/autoscaling/resources/target_test.go).
"""

from dataclasses import replace
from math import floor

import pytest

from controlplane.scaling.policy.kpa import (
    UNKNOWN,
    Decision,
    KpaState,
    Observation,
    ScalingSpec,
    decide,
    initial_state,
    resolve_target,
)

UTILIZATION = 0.75
T0 = 10_000.0


def spec(
    target: float = 10.0,
    burst: float = 100.0,
    *,
    up: float = 10.0,
    down: float = 10.0,
    activation: int = 0,
    reachable: bool = True,
) -> ScalingSpec:
    """Return a spec as in Knative's tests: rates of 10, a panic threshold of 2, a window of one minute."""
    return ScalingSpec(
        target_value=target,
        total_value=target / UTILIZATION,
        target_burst_capacity=burst,
        panic_threshold=2.0,
        max_scale_up_rate=up,
        max_scale_down_rate=down,
        stable_window_s=60.0,
        activation_scale=activation,
        reachable=reachable,
    )


def excess(target: float, burst: float, panic: float, ready: int) -> int:
    """Return the excess burst capacity that Knative's tests expect."""
    return floor(target / UTILIZATION * ready - burst - panic)


def seen(stable: float, panic: float, ready: int) -> Observation:
    return Observation(stable=stable, panic=panic, ready_pods=ready)


@pytest.mark.parametrize(
    ("of", "observed", "state", "want"),
    [
        pytest.param(spec(), seen(0, 0, 1), KpaState(), 0, id="no load wants no pod"),
        pytest.param(spec(181, -1), seen(21, 26, 1), KpaState(), 1, id="unlimited burst capacity"),
        pytest.param(spec(10, 0), seen(50, 49, 1), KpaState(), 5, id="no burst capacity"),
        pytest.param(spec(), seen(50, 50, 1), KpaState(), 5, id="five times the target wants five"),
        pytest.param(
            spec(1), seen(50, 30, 5), KpaState(panic_time_s=T0 - 5, max_panic_pods=5), 50,
            id="in panic the larger stable value wins",
        ),
        pytest.param(
            spec(1), seen(20, 30, 5), KpaState(panic_time_s=T0 - 5, max_panic_pods=5), 30,
            id="in panic the larger panic value wins",
        ),
        pytest.param(spec(), seen(50, 50, 5), KpaState(), 5, id="enough are ready already"),
        pytest.param(spec(1, 1982, up=1.1), seen(3, 3.1, 2), KpaState(), 3, id="a small rate still allows one more"),
        pytest.param(spec(10, 1982, down=1.1), seen(1, 1, 100), KpaState(), 90, id="down by the small rate only"),
        pytest.param(
            spec(10, 1982, down=1.1, reachable=False), seen(1, 1, 100), KpaState(), 1,
            id="an unreachable version goes down at once",
        ),
        pytest.param(spec(10, 84), seen(50, 100, 1), KpaState(), 10, id="twice the pods wanted is panic"),
        pytest.param(spec(10, 61), seen(1000, 1001, 1), KpaState(), 10, id="up by at most ten times"),
        pytest.param(spec(10, 61), seen(1000, 1001, 10), KpaState(), 100, id="up by ten times again"),
        pytest.param(spec(10, 61), seen(1, 1, 100), KpaState(), 10, id="down by at most ten times"),
        pytest.param(spec(10, 61), seen(1, 1, 10), KpaState(), 1, id="down by ten times again"),
        pytest.param(spec(10, 81), seen(1000, 888, 0), KpaState(), 10, id="none ready: the rate counts from one"),
        pytest.param(spec(10, 75), seen(1, 0, 1), KpaState(), 1, id="load in the stable window keeps one"),
        pytest.param(spec(10, 75), seen(0, 0, 1), KpaState(), 0, id="no load in the stable window keeps none"),
        pytest.param(
            spec(10, 75, activation=2), seen(0, 0, 1), KpaState(), 0, id="the activation scale is not for zero"
        ),
        pytest.param(spec(10, 75, activation=2), seen(1, 0, 1), KpaState(), 2, id="from zero: the activation scale"),
        pytest.param(
            spec(10, 75, up=2, activation=7), seen(1, 1, 1), KpaState(), 7, id="the activation scale ignores the rate"
        ),
        pytest.param(spec(10, 75, activation=1), seen(1, 0, 1), KpaState(), 1, id="activation scale of one"),
    ],
)  # fmt: skip
def test_one_tick(of: ScalingSpec, observed: Observation, state: KpaState, want: int) -> None:
    """The decision has the desired scale and the excess burst capacity of Knative's formula."""
    decision = decide(of, observed, state, T0)
    burst = of.target_burst_capacity
    want_excess = (
        int(burst) if burst in (0, -1) else excess(of.target_value, burst, observed.panic, observed.ready_pods)
    )
    assert (decision.desired, decision.excess_burst_capacity, decision.valid) == (want, want_excess, True)


@pytest.mark.parametrize(
    "observed",
    [
        pytest.param(Observation(stable=1000, panic=888, ready_pods=1, ready_error=True), id="pods cannot be counted"),
        pytest.param(Observation(stable=0, panic=0, ready_pods=1, metric_error=True), id="there are no metrics"),
    ],
)
def test_metric_error_keeps_the_state(observed: Observation) -> None:
    """The state stays as it was, however old."""
    state = KpaState(panic_time_s=0.0, max_panic_pods=7, delay=((3, 4),))
    assert decide(spec(), observed, state, T0) == Decision(0, 0, False, state)


class Decider:
    """Calls `decide` tick by tick and keeps its state."""

    def __init__(self, of: ScalingSpec, ready: int = 1, now: float = T0) -> None:
        self.spec = of
        self.state = initial_state(ready, now, of.scale_down_delay_s)

    def tick(self, stable: float, panic: float, ready: int, now: float) -> int:
        decision = decide(self.spec, seen(stable, panic, ready), self.state, now)
        self.state = decision.state
        return decision.desired


def test_panic_ends_after_a_stable_window() -> None:
    """After a surge the scale falls a minute after the threshold was last crossed."""
    decider = Decider(spec(10, 93))
    assert decider.tick(100, 100, 1, T0) == 10
    assert decider.tick(100, 1000, 10, T0) == 100
    assert decider.tick(1, 1, 10, T0 + 30) == 100
    assert decider.tick(1, 1, 10, T0 + 60) == 100, "exactly a window later it still holds"
    assert decider.tick(1, 1, 10, T0 + 61) == 1
    assert decider.state == KpaState()


def test_a_slow_increase_ends_the_panic() -> None:
    """Below the threshold the panic time stays the same, also while the load rises."""
    decider = Decider(spec(1, 98))
    assert decider.tick(11, 25, 10, T0) == 25
    assert decider.state.panic_time_s == T0
    assert decider.tick(30, 41, 40, T0 + 30) == 41
    assert decider.state.panic_time_s == T0
    assert decider.tick(50, 56, 55, T0 + 62) == 50
    assert decider.state.panic_time_s is None


def test_a_further_surge_extends_the_panic() -> None:
    """Crossing the threshold again moves the panic time."""
    decider = Decider(spec(1, 98))
    decider.tick(11, 25, 10, T0)
    assert decider.tick(30, 80, 40, T0 + 30) == 80
    assert decider.state.panic_time_s == T0 + 30


def test_exponential_growth_is_followed() -> None:
    """Each step is six times the last, within the rate of ten."""
    decider, ready = Decider(spec(1, 101)), 1
    for step, load in enumerate((6, 36, 216, 1296)):
        assert decider.tick(load, load, ready, T0 + step) == load
        assert decider.state.panic_time_s == T0 + step
        ready = load
    assert decider.tick(1296, 1296, 1296, T0 + 5) == 1296


@pytest.mark.parametrize(
    ("ready", "want"),
    [
        pytest.param(0, KpaState(), id="at zero nothing needs holding"),
        pytest.param(1, KpaState(max_panic_pods=1), id="at one nothing needs holding"),
        pytest.param(2, KpaState(panic_time_s=T0, max_panic_pods=2), id="from two on it starts in panic"),
    ],
)
def test_restart_keeps_the_scale(ready: int, want: KpaState) -> None:
    """A restart has no metrics, which must not look like no load."""
    assert initial_state(ready, T0) == want
    if ready == 2:
        assert decide(spec(), seen(0, 0, 2), initial_state(2, T0), T0 + 2).desired == 2


DELAYED = replace(spec(10, 0, up=10, down=10), scale_down_delay_s=300.0, panic_threshold=100.0, stable_window_s=0.0)


def test_scaling_down_is_delayed() -> None:
    """The delay is five minutes in buckets of two seconds. Scaling up is not delayed."""
    decider, start = Decider(DELAYED, ready=0), 10_000.0
    assert decider.tick(40, 40, 0, start + 2) == 4
    assert decider.tick(0, 0, 0, start + 300) == 4
    assert decider.tick(0, 0, 0, start + 302) == 0
    for minute, load, want in ((9, 40, 4), (10, 30, 4), (11, 0, 4), (14, 0, 3), (15, 0, 0)):
        assert decider.tick(load, load, 0, start + 60 * minute) == want


def test_an_unreachable_version_is_not_delayed() -> None:
    """It scales down at the next tick."""
    decider = Decider(DELAYED, ready=0)
    assert decider.tick(40, 40, 0, T0 + 2) == 4
    assert decider.tick(0, 0, 0, T0 + 60) == 4
    decider.spec = replace(DELAYED, reachable=False)
    assert decider.tick(0, 0, 0, T0 + 62) == 0


def test_without_a_delay_the_latest_wish_counts() -> None:
    """This holds twice within one bucket, where a delay of one bucket would keep the larger value."""
    decider = Decider(replace(DELAYED, scale_down_delay_s=0.0), ready=0)
    assert decider.tick(40, 40, 0, T0) == 4
    assert decider.tick(20, 20, 0, T0 + 0.5) == 2


@pytest.mark.parametrize(
    ("wishes", "buckets", "want"),
    [
        pytest.param([5, 6, 5, 5, 5, 5, 5], range(7), [5, 6, 6, 6, 6, 6, 5], id="the largest leaves after the window"),
        pytest.param([6, 5, 2, 1], [0, 1, 2, 6], [6, 6, 6, 2], id="with a gap"),
        pytest.param([5, 6, 5, 7, 5, 5, 1], range(7), [5, 6, 6, 7, 7, 7, 7], id="a second peak"),
        pytest.param(
            [5, 8, 5, 7, 5, 5, 1, 4, 4, 4, 4, 9, 3, 4, 2, 1, 0], range(17),
            [5, 8, 8, 8, 8, 8, 7, 7, 5, 5, 4, 9, 9, 9, 9, 9, 4], id="several peaks",
        ),
        pytest.param([1, 2, 3, 4], [1] * 4, [1, 2, 3, 4], id="rising within one bucket"),
        pytest.param([7, 6, 5, 4], [1] * 4, [7, 7, 7, 7], id="falling within one bucket"),
    ],
)  # fmt: skip
def test_the_delay_window(wishes: list[int], buckets: list[int], want: list[int]) -> None:
    """The delay keeps the largest desired scale of the last five buckets of two seconds."""
    decider = Decider(replace(DELAYED, scale_down_delay_s=10.0, max_scale_down_rate=1e9), ready=0)
    got = [decider.tick(wish * 10, wish * 10, 0, 2.0 * bucket) for wish, bucket in zip(wishes, buckets, strict=True)]
    assert got == want


@pytest.mark.parametrize(
    ("metric", "hard", "target", "utilization", "fraction", "want"),
    [
        pytest.param("concurrency", 0, None, None, 1.0, (100, 100), id="the default"),
        pytest.param("concurrency", 0, None, None, 0.8, (80, 100), id="default, 80 %"),
        pytest.param("concurrency", 12, None, 0.75, 0.8, (9, 12), id="a given utilization wins"),
        pytest.param("concurrency", 10, None, None, 0.8, (8, 10), id="hard limit of ten"),
        pytest.param("concurrency", 1, None, None, 0.8, (0.8, 1), id="hard limit of one"),
        pytest.param("concurrency", 0, 1, None, 1.0, (1, 1), id="a given target"),
        pytest.param("concurrency", 0, 1, None, 0.001, (0.01, 1), id="never below the least target"),
        pytest.param("concurrency", 0, 10, None, 0.75, (7.5, 10), id="given target and fraction"),
        pytest.param("concurrency", 10, 1, None, 1.0, (1, 1), id="a target below the hard limit"),
        pytest.param("concurrency", 0, 500, None, 1.0, (500, 500), id="a target over the default"),
        pytest.param("concurrency", 1, 10, None, 1.0, (1, 1), id="a target over the hard limit is cut"),
        pytest.param("rps", 1, None, None, 1.0, (140, 200), id="requests per second: the default"),
        pytest.param("rps", 0, 1, None, 1.0, (0.7, 1), id="requests per second: a target"),
        pytest.param("rps", 0, None, 0.75, 1.0, (150, 200), id="requests per second: a utilization"),
        pytest.param("rps", 1, 300, None, 1.0, (210, 300), id="requests per second: no hard limit"),
    ],
)
def test_resolve_target(
    metric: str,
    hard: float,
    target: float | None,
    utilization: float | None,
    fraction: float,
    want: tuple[float, float],
) -> None:
    """The result is (target per pod, capacity of a pod)."""
    got = resolve_target(
        metric,
        container_concurrency=hard,
        target=target,
        utilization=utilization,
        concurrency_utilization=fraction,
    )
    assert got == pytest.approx(want)


def test_the_invariant_finds_a_decider_that_goes_down_in_panic() -> None:
    """Negative control: without the remembered maximum the scale falls during a panic."""
    state = decide(spec(1, 98), seen(11, 25, 10), initial_state(10, T0), T0).state
    remembering = decide(spec(1, 98), seen(5, 5, 25), state, T0 + 10)
    forgetful = decide(spec(1, 98), seen(5, 5, 25), replace(state, max_panic_pods=0), T0 + 10)
    assert remembering.desired == 25
    assert forgetful.desired < 25


def test_defaults_are_knative_s() -> None:
    of = ScalingSpec()
    assert (of.scaling_metric, of.target_value, of.total_value) == ("concurrency", 70.0, 100.0)
    assert (of.target_burst_capacity, of.panic_threshold) == (211.0, 2.0)
    assert (of.max_scale_up_rate, of.max_scale_down_rate) == (1000.0, 2.0)
    assert (of.stable_window_s, of.scale_down_delay_s) == (60.0, 0.0)
    assert (of.activation_scale, of.initial_scale, of.reachable) == (0, 1, True)
    assert UNKNOWN == -1
