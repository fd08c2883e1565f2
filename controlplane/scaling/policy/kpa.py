"""Decide how many replicas a version needs from its concurrency: Knative's KPA, exactly.

Facts from knative/serving, pkg/autoscaler/scaling/autoscaler.go and multiscaler.go. Bounds and scale-to-zero are
`idle`'s work, averages `windows`'. Times are seconds of one clock; replicas are called pods where Knative's names are.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from controlplane.scaling.policy.go_numbers import go_ceil, go_divide, go_floor, go_max, go_min, int32, to_nanoseconds

CONCURRENCY: Final = "concurrency"
RPS: Final = "rps"
TICK_S: Final = 2.0
TARGET_MIN: Final = 0.01
UNKNOWN: Final = -1  # the first desired scale, before there was data

CONCURRENCY_TARGET_DEFAULT: Final = 100.0
CONCURRENCY_UTILIZATION_DEFAULT: Final = 0.7
RPS_TARGET_DEFAULT: Final = 200.0
RPS_UTILIZATION: Final = 0.7
_TICK_NS: Final = to_nanoseconds(TICK_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec:
    """How one version is to be scaled. Defaults are Knative's."""

    scaling_metric: str = CONCURRENCY
    target_value: float = CONCURRENCY_TARGET_DEFAULT * CONCURRENCY_UTILIZATION_DEFAULT  # aimed at, per pod
    total_value: float = CONCURRENCY_TARGET_DEFAULT  # what a pod can take
    target_burst_capacity: float = 211.0  # -1: the activator always in the path; 0: only at zero
    panic_threshold: float = 2.0  # ratio of the pods wanted to those ready
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    stable_window_s: float = 60.0
    scale_down_delay_s: float = 0.0  # as it is at the decider's start: a later change is not heeded
    activation_scale: int = 0  # the least non-zero scale; below 2 it does nothing
    initial_scale: int = 1
    reachable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was seen at one tick: window averages over all pods, and how many pods are ready."""

    stable: float
    panic: float
    ready_pods: int
    metric_error: bool = False  # no data where there should be some
    ready_error: bool = False  # pods could not be counted (none found is 0, not an error)


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaState:
    """What the decider remembers from tick to tick."""

    panic_time_s: float | None = None  # when the threshold was last crossed; None outside panic
    max_panic_pods: int = 0
    delay_buckets: int = 0  # of 2 s, how long a scale down is delayed; 0: it is not
    delay: tuple[tuple[int, int], ...] = ()  # (bucket, largest wish in it), each smaller than the one before


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas wanted, spare capacity over the wanted burst, and what to remember. Not valid: change nothing."""

    desired: int
    excess_burst_capacity: int
    valid: bool
    memory: KpaState


def initial_state(ready_pods: int, now: float, scale_down_delay_s: float = 0.0) -> KpaState:
    """At a decider's start. A restart loses the metrics: more than one ready pod is held by starting in panic."""
    return KpaState(
        panic_time_s=now if ready_pods > 1 else None,
        max_panic_pods=ready_pods,
        delay_buckets=max(0, ceil(to_nanoseconds(scale_down_delay_s) / _TICK_NS)),
    )


def decide(spec: ScalingSpec, seen: Observation, memory: KpaState, now: float) -> Decision:
    """One tick. Total: any observation gives a decision; an erroneous one is not valid and is not remembered."""
    if seen.ready_error or seen.metric_error:
        return Decision(0, 0, False, memory)
    ready = float(max(1, seen.ready_pods))
    stable_raw = go_ceil(go_divide(seen.stable, spec.target_value))
    panic_raw = go_ceil(go_divide(seen.panic, spec.target_value))
    stable = _apply_rate_limits(spec, stable_raw, ready)
    panic = _apply_rate_limits(spec, panic_raw, ready)
    memory = _update_panic(spec, memory, over=panic_raw / ready >= spec.panic_threshold, now=now)
    desired = stable
    if memory.panic_time_s is not None:
        # Never down while in panic: the surge must have made its way into the stable window first.
        desired = max(stable, panic, memory.max_panic_pods)
        memory = replace(memory, max_panic_pods=desired)
    if spec.reachable and memory.delay_buckets:
        memory = replace(memory, delay=_update_delay_window(memory, desired, now))
        desired = memory.delay[0][1]
    return Decision(desired, _excess_burst_capacity(spec, seen), True, memory)


def resolve_target(
    scaling_metric: str = CONCURRENCY,
    *,
    container_concurrency: float = 0.0,
    target: float | None = None,
    utilization: float | None = None,
    concurrency_default: float = CONCURRENCY_TARGET_DEFAULT,
    concurrency_utilization: float = CONCURRENCY_UTILIZATION_DEFAULT,
) -> tuple[float, float]:
    """(target_value, total_value) from a hard limit per pod (0: none), a wished target and a utilization (fraction)."""
    if scaling_metric == RPS:
        total, fraction = RPS_TARGET_DEFAULT, RPS_UTILIZATION
    else:
        total, fraction = container_concurrency or concurrency_default, concurrency_utilization
    if target is not None:
        total = target
        if scaling_metric == CONCURRENCY and container_concurrency:
            total = min(target, container_concurrency)  # never aim over what a pod admits
    if utilization is not None:
        fraction = utilization
    return max(TARGET_MIN, total * fraction), total


def _apply_rate_limits(spec: ScalingSpec, wanted: float, ready: float) -> int:
    """Within the rates, which are rounded so that one pod up or down is always possible; then the activation scale."""
    most = go_ceil(spec.max_scale_up_rate * ready)
    least = go_floor(go_divide(ready, spec.max_scale_down_rate)) if spec.reachable else 0.0
    limited = int32(go_min(go_max(wanted, least), most))
    return max(limited, spec.activation_scale) if wanted > 0 and spec.activation_scale > 1 else limited


def _update_panic(spec: ScalingSpec, memory: KpaState, *, over: bool, now: float) -> KpaState:
    if over:
        return replace(memory, panic_time_s=now)
    if memory.panic_time_s is None:
        return memory
    if to_nanoseconds(memory.panic_time_s) + to_nanoseconds(spec.stable_window_s) < to_nanoseconds(now):
        return replace(memory, panic_time_s=None, max_panic_pods=0)
    return memory


def _update_delay_window(memory: KpaState, desired: int, now: float) -> tuple[tuple[int, int], ...]:
    """Wishes of the delay window, only those that no later one reaches: their largest is the first."""
    bucket, kept = to_nanoseconds(now) // _TICK_NS, list(memory.delay)
    while kept and desired >= kept[-1][1]:
        kept.pop()
    while kept and bucket - kept[0][0] >= memory.delay_buckets:
        kept.pop(0)
    if kept and kept[-1][0] == bucket:
        _, desired = kept.pop()  # a larger wish of the same bucket stands
    kept.append((bucket, desired))
    return tuple(kept[-memory.delay_buckets :])  # the bound matters to a clock that goes back, no other


def _excess_burst_capacity(spec: ScalingSpec, seen: Observation) -> int:
    """Negative: the pods could not take the wanted burst, the activator stays in the path."""
    if spec.target_burst_capacity == 0:
        return 0
    if spec.target_burst_capacity < 0:
        return -1
    # The true count, not one for none; the panic average, so that no knee-jerk takes the activator out.
    return int32(go_floor(seen.ready_pods * spec.total_value - spec.target_burst_capacity - seen.panic))
