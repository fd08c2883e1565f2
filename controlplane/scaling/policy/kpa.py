"""Decide how many replicas a version needs from its concurrency, exactly as Knative's pod autoscaler (KPA) does.

Follows knative/serving, pkg/autoscaler/scaling/autoscaler.go and multiscaler.go. `scale_to_zero.py` applies bounds,
`windows.py` computes averages. Times are seconds of one clock. Replicas are called pods where Knative's names are.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from controlplane.scaling.policy.go_numbers import go_ceil, go_divide, go_floor, go_max, go_min, int32, to_nanoseconds

CONCURRENCY: Final = "concurrency"
RPS: Final = "rps"
TICK_S: Final = 2.0
TARGET_MIN: Final = 0.01
UNKNOWN: Final = -1  # the desired scale before there is data

CONCURRENCY_TARGET_DEFAULT: Final = 100.0
CONCURRENCY_UTILIZATION_DEFAULT: Final = 0.7
RPS_TARGET_DEFAULT: Final = 200.0
RPS_UTILIZATION: Final = 0.7
_TICK_NS: Final = to_nanoseconds(TICK_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec:
    """How one version is scaled. Defaults are Knative's."""

    scaling_metric: str = CONCURRENCY  # only `kelvin scale replay` sets another one
    target_value: float = CONCURRENCY_TARGET_DEFAULT * CONCURRENCY_UTILIZATION_DEFAULT  # desired load per pod
    total_value: float = CONCURRENCY_TARGET_DEFAULT  # maximum load of a pod
    target_burst_capacity: float = 211.0  # -1: the activator is always in the path; 0: only at zero
    panic_threshold: float = 2.0  # ratio of wanted pods to ready pods
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    stable_window_s: float = 60.0
    scale_down_delay_s: float = 0.0  # fixed when the decider starts: later changes have no effect
    activation_scale: int = 0  # least scale above zero; below 2 it has no effect
    initial_scale: int = 1
    reachable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The input of one tick: window averages over all pods, and the number of ready pods."""

    stable: float
    panic: float
    ready_pods: int
    metric_error: bool = False  # data is missing although some was expected
    ready_error: bool = False  # counting the pods failed (no pods is 0, not an error)


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaState:
    """State of the decider between ticks."""

    panic_time_s: float | None = None  # when the threshold was last crossed; None outside panic mode
    max_panic_pods: int = 0
    delay_buckets: int = 0  # delay of a scale-down, in buckets of 2 s; 0: no delay
    delay: tuple[tuple[int, int], ...] = ()  # (bucket, its largest desired scale), scales falling


@dataclass(frozen=True, slots=True)
class Decision:
    """Desired replicas, capacity beyond the target burst, and the new state. If it is not valid, change nothing."""

    desired: int
    excess_burst_capacity: int
    valid: bool
    state: KpaState


def initial_state(ready_pods: int, now: float, scale_down_delay_s: float = 0.0) -> KpaState:
    """Return a new decider's state. If more than one pod is ready, it begins in panic mode, which keeps them."""
    return KpaState(
        panic_time_s=now if ready_pods > 1 else None,
        max_panic_pods=ready_pods,
        delay_buckets=max(0, ceil(to_nanoseconds(scale_down_delay_s) / _TICK_NS)),
    )


def decide(spec: ScalingSpec, observation: Observation, state: KpaState, now: float) -> Decision:
    """Decide for one tick. Never raises: after a metrics error, the decision is not valid and keeps the state."""
    if observation.ready_error or observation.metric_error:
        return Decision(0, 0, False, state)
    ready = float(max(1, observation.ready_pods))
    stable_raw = go_ceil(go_divide(observation.stable, spec.target_value))
    panic_raw = go_ceil(go_divide(observation.panic, spec.target_value))
    stable = _apply_rate_limits(spec, stable_raw, ready)
    panic = _apply_rate_limits(spec, panic_raw, ready)
    state = _update_panic(spec, state, over=panic_raw / ready >= spec.panic_threshold, now=now)
    desired = stable
    if state.panic_time_s is not None:
        # Panic mode never scales down: the surge must reach the stable window first.
        desired = max(stable, panic, state.max_panic_pods)
        state = replace(state, max_panic_pods=desired)
    if spec.reachable and state.delay_buckets:
        state = replace(state, delay=_update_delay_window(state, desired, now))
        desired = state.delay[0][1]
    return Decision(desired, _excess_burst_capacity(spec, observation), True, state)


def resolve_target(
    scaling_metric: str = CONCURRENCY,
    *,
    container_concurrency: float = 0.0,
    target: float | None = None,
    utilization: float | None = None,
    concurrency_default: float = CONCURRENCY_TARGET_DEFAULT,
    concurrency_utilization: float = CONCURRENCY_UTILIZATION_DEFAULT,
) -> tuple[float, float]:
    """Return (target_value, total_value) from the hard limit per pod (0: none), target and utilization (a fraction)."""
    if scaling_metric == RPS:
        total, fraction = RPS_TARGET_DEFAULT, RPS_UTILIZATION
    else:
        total, fraction = container_concurrency or concurrency_default, concurrency_utilization
    if target is not None:
        total = target
        if scaling_metric == CONCURRENCY and container_concurrency:
            total = min(target, container_concurrency)  # never aim above the hard limit of a pod
    if utilization is not None:
        fraction = utilization
    return max(TARGET_MIN, total * fraction), total


def _apply_rate_limits(spec: ScalingSpec, wanted: float, ready: float) -> int:
    """Apply the maximum rates, then the activation scale. Rounding allows at least one pod more or less."""
    most = go_ceil(spec.max_scale_up_rate * ready)
    minimum = go_floor(go_divide(ready, spec.max_scale_down_rate)) if spec.reachable else 0.0
    limited = int32(go_min(go_max(wanted, minimum), most))
    return max(limited, spec.activation_scale) if wanted > 0 and spec.activation_scale > 1 else limited


def _update_panic(spec: ScalingSpec, state: KpaState, *, over: bool, now: float) -> KpaState:
    if over:
        return replace(state, panic_time_s=now)
    if state.panic_time_s is None:
        return state
    if to_nanoseconds(state.panic_time_s) + to_nanoseconds(spec.stable_window_s) < to_nanoseconds(now):
        return replace(state, panic_time_s=None, max_panic_pods=0)
    return state


def _update_delay_window(state: KpaState, desired: int, now: float) -> tuple[tuple[int, int], ...]:
    """Return the delay window with `desired`. It keeps values above all later ones, so the first is the largest."""
    bucket, kept = to_nanoseconds(now) // _TICK_NS, list(state.delay)
    while kept and desired >= kept[-1][1]:
        kept.pop()
    while kept and bucket - kept[0][0] >= state.delay_buckets:
        kept.pop(0)
    if kept and kept[-1][0] == bucket:
        _, desired = kept.pop()  # keep the larger value of the same bucket
    kept.append((bucket, desired))
    return tuple(kept[-state.delay_buckets :])  # this limit matters only if the clock goes backwards


def _excess_burst_capacity(spec: ScalingSpec, observation: Observation) -> int:
    """Return the capacity beyond the target burst. If it is negative, the activator stays in the path."""
    if spec.target_burst_capacity == 0:
        return 0
    if spec.target_burst_capacity < 0:
        return -1
    # Use the true count of ready pods, which may be 0. The panic average takes the activator out of the path less
    # hastily.
    return int32(go_floor(observation.ready_pods * spec.total_value - spec.target_burst_capacity - observation.panic))
