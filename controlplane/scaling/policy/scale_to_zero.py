"""Apply `min` and `max` to the desired scale, and decide when an idle version may lose its last replica.

Follows knative/serving, `pkg/reconciler/autoscaling/kpa/scaler.go` and `kpa.go`. All requests come through the
activator, so it is always in the path. The desired scale comes from `kpa.py`. Times are seconds of one clock.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from controlplane.scaling.policy.kpa import UNKNOWN
from kelvin.contracts.errors import InvalidRequest, Refused

LOCAL_WINDOW_MIN_S: Final = 6
LOCAL_WINDOW_MAX_S: Final = 3600


class Activity(StrEnum):
    """Knative's condition Active: Unknown, True, False."""

    ACTIVATING = "activating"
    ACTIVE = "active"
    INACTIVE = "inactive"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSpec:
    """Bounds and timeouts of one version. Defaults are Knative's; a `max_scale` of 0 means no bound."""

    min_scale: int = 0
    max_scale: int = 0
    initial_scale: int = 1
    stable_window_s: float = 60.0
    grace_s: float = 30.0  # how long the last replica stays after the version became inactive
    activation_timeout_s: float = 630.0
    to_zero: bool = True
    reachable: bool = True  # an alias or a traffic split leads to it


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleFacts:
    """The desired scale, and the version's activity since `since_s`."""

    desired: int  # UNKNOWN (-1) before there is data
    activity: Activity
    since_s: float
    initialized: bool  # the initial scale was reached once


@dataclass(frozen=True, slots=True)
class Apply:
    """Scale to `want` replicas."""

    want: int


@dataclass(frozen=True, slots=True)
class Deactivate:
    """The version was idle long enough. It becomes inactive and keeps its replicas; the grace period begins."""

    want: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """Change nothing at this tick."""

    want: int


ScaleDecision = Apply | Deactivate | Hold


def clamp_scale(spec: IdleSpec, desired: int, *, initialized: bool) -> int:
    """Return `desired` within min and max. Min is the initial scale until reached, and 0 for unreachable versions."""
    minimum = spec.min_scale if spec.reachable else 0
    if spec.initial_scale > 1 and not initialized and spec.reachable:
        minimum = max(minimum, spec.initial_scale)
    if desired < minimum:
        return minimum
    return spec.max_scale if spec.max_scale and desired > spec.max_scale else desired


def decide(spec: IdleSpec, facts: IdleFacts, now: float) -> ScaleDecision:
    """Return the first that applies.

    1. There is no data yet: hold.
    2. The desired scale, within bounds, is above 0: apply it.
    3. Scale to zero is off: keep one replica.
    4. It is activating: hold; after the timeout the activation has failed, so apply 0.
    5. It is active: keep one replica for the rest of the stable window, then deactivate.
    6. It is inactive: hold; after the grace period apply 0.
    """
    # (1)
    if facts.desired < 0 and facts.activity is not Activity.ACTIVATING:
        return Hold(UNKNOWN)
    # (2)
    desired = clamp_scale(spec, facts.desired, initialized=facts.initialized)
    if desired != 0:
        return Apply(desired)
    # (3)
    if not spec.to_zero:
        return Apply(1)
    duration_s = now - facts.since_s
    match facts.activity:
        case Activity.ACTIVATING:  # (4)
            if duration_s > spec.activation_timeout_s:
                return Apply(0)
            return Hold(UNKNOWN)
        case Activity.ACTIVE:  # (5)
            if duration_s >= spec.stable_window_s:
                return Deactivate()
            return Apply(1)
        case Activity.INACTIVE:  # (6)
            return Apply(0) if duration_s >= spec.grace_s else Hold(0)


def active_threshold(spec: IdleSpec, *, initialized: bool) -> int:
    """Return how many ready replicas make a version active."""
    minimum = spec.min_scale if spec.reachable else 0
    return max(minimum, 1 if initialized else spec.initial_scale)


def next_activity(before: Activity, want: int, ready: int, threshold: int) -> Activity:
    """Return the activity after a decision (`want` of the outcome) with `ready` replicas."""
    if want == 0 or threshold == 0:
        return Activity.INACTIVE
    if want < 0 and before is Activity.INACTIVE:
        return Activity.INACTIVE
    return Activity.ACTIVE if ready >= threshold else Activity.ACTIVATING


def check_local_window(window_s: float) -> float:
    """Return the stable window if one machine supports it, otherwise raise Refused(InvalidRequest) with the rule."""
    if not LOCAL_WINDOW_MIN_S <= window_s <= LOCAL_WINDOW_MAX_S or window_s != int(window_s):
        rule = f"must be whole seconds from {LOCAL_WINDOW_MIN_S} to {LOCAL_WINDOW_MAX_S}"
        raise Refused(InvalidRequest("window_s", f"{window_s:g}", rule))
    return window_s
