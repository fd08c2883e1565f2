"""Scaling state of one version: its windows, the KPA's state, its activity. Pure but for its own state.

It decides how many replicas there should be, and how warm the last one stays. The autoscaler calls it, and the actuator
makes the replicas.
"""

from collections.abc import Callable, Sequence
from typing import Final

from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.policy import kpa, scale_to_zero
from controlplane.scaling.policy.breakeven import Level, LevelChange, level_after
from controlplane.scaling.policy.kpa import Observation, ScalingSpec
from controlplane.scaling.policy.reclaim import MIN_IDLE_S
from controlplane.scaling.policy.scale_settings import ScaleSettings
from controlplane.scaling.policy.scale_to_zero import Activity, IdleFacts, IdleSpec
from controlplane.scaling.policy.windows import LinearWindow, convert_window, panic_window_s

PANIC_WINDOW_PERCENT: Final = 10.0
FAILURE_SPACING_S: Final = 1.0
MINIMUM_RETRY_S: Final = 30.0  # a version with a minimum is tried again after this time without a request
LATE_REPORT_S: Final = 1.5  # activators report each second; an earlier report may be older than it looks


def scaling_spec(scale: ScaleSettings, max_streams: int, *, reachable: bool) -> ScalingSpec:
    """Return Knative's defaults, the streams as hard limit per replica, and the activator always in the path."""
    target, total = kpa.resolve_target(container_concurrency=max_streams, target=scale.target)
    return ScalingSpec(
        target_value=target,
        total_value=total,
        target_burst_capacity=-1.0,
        stable_window_s=scale.window_s,
        reachable=reachable,
    )


def idle_spec(scale: ScaleSettings, minimum: int, *, reachable: bool) -> IdleSpec:
    """Return the bounds and timeouts of a version."""
    return IdleSpec(
        min_scale=minimum,
        max_scale=scale.max,
        stable_window_s=scale.window_s,
        grace_s=scale.grace_s,
        reachable=reachable,
    )


def may_sleep(scale: ScaleSettings) -> bool:
    """Return whether the last replica may sleep instead of ending."""
    return scale.idle in ("sleep", "sleep2", "auto")


class VersionScaler:
    """State of a version that has replicas, wants some, or had traffic lately. Times are monotonic seconds."""

    def __init__(self, key: VersionKey, window_s: float, ready: int, now: float) -> None:
        self.key = key
        self._window_s = window_s
        self._stable = LinearWindow(window_s)
        self._panic = LinearWindow(panic_window_s(window_s, PANIC_WINDOW_PERCENT))
        self._kpa_state = kpa.initial_state(ready, now)
        self._activity = Activity.ACTIVE if ready else Activity.INACTIVE
        self._activity_since_s = now
        self._not_before_s = now
        self._last_exit_s: float | None = None  # a process of the version died, for whatever reason
        self._replacement_due_s: float | None = None  # when the last serving replica that died may be replaced
        # When its replicas were taken away. Late reports are about earlier requests.
        self._scaled_to_zero_s: float | None = None
        # A report came so soon afterwards that its requests may be from before or after.
        self._has_ambiguous_report = False
        self._needs_request = False
        self.last_request_s = now  # when it was last requested
        self.requested_us: int | None = None  # since when a caller waits at zero

    def __repr__(self) -> str:
        emptied = "" if self._scaled_to_zero_s is None else " emptied"
        return f"<VersionScaler {self.key} {self._activity}{emptied}>"

    def record(self, concurrency: float, requests: int, present: int, now: float) -> bool:
        """Record a report. Return whether callers want the version, apart from requests that are being finished.

        `present` processes may still serve requests from before the version's replicas were taken away.
        """
        if self._scaled_to_zero_s is not None and self._is_possibly_stale(
            self._scaled_to_zero_s, concurrency, requests, present, now
        ):
            return False
        self._stable.record(now, concurrency)
        self._panic.record(now, concurrency)
        if concurrency > 0:
            self._scaled_to_zero_s = None
            self._needs_request = False
            self.last_request_s = now
        return concurrency > 0

    def _is_possibly_stale(
        self, scaled_to_zero_s: float, concurrency: float, requests: int, present: int, now: float
    ) -> bool:
        """Return whether a report may be about requests from before the replicas were taken away. A waiting request is
        reported again.

        The announcement of a request that waits at zero is never stale. It is sent at once and again while the request
        waits, each time as exactly one request at concurrency one. If a caller may have come without an announcement
        soon after the replicas went, later reports count as that caller's.
        """
        if (concurrency, requests) == (1.0, 1):
            return False
        if now < scaled_to_zero_s + LATE_REPORT_S:
            self._has_ambiguous_report = self._has_ambiguous_report or requests > 0
            return True
        if requests or self._has_ambiguous_report:
            return False
        return present > 0 or (self._last_exit_s is not None and now < self._last_exit_s + LATE_REPORT_S)

    def decide(
        self,
        model: Model,
        version: Version,
        *,
        minimum: int,
        ready: int,
        live: int,
        level_changes: Callable[[], Sequence[LevelChange]],
        now: float,
    ) -> int | Level | None:
        """Return the replicas to have now, or the level at which the last one stays; None to leave the version as it
        is.

        `minimum` is the one that holds for the version now. It may be less than the model's setting.
        `level_changes` returns the levels by break-even.
        """
        if self._needs_request and live == 0 and not self._may_retry(minimum, now) and not may_sleep(model.scale):
            return 0  # nothing may start, and nothing sleeps
        scale, reachable = model.scale, version.registration.version in model.named
        self._stable, self._panic = (
            convert_window(scale.average, self._stable),
            convert_window(scale.average, self._panic),
        )
        self._resize(scale.window_s, now)
        observation = Observation(stable=self._stable.average(now), panic=self._panic.average(now), ready_pods=ready)
        streams = version.registration.limits.max_streams
        decision = kpa.decide(scaling_spec(scale, streams, reachable=reachable), observation, self._kpa_state, now)
        self._kpa_state = decision.state
        spec = idle_spec(scale, minimum, reachable=reachable)
        facts = IdleFacts(
            desired=decision.desired, activity=self._activity, since_s=self._activity_since_s, initialized=True
        )
        outcome = scale_to_zero.decide(spec, facts, now)
        threshold = scale_to_zero.active_threshold(spec, initialized=True)
        self._set_activity(scale_to_zero.next_activity(self._activity, outcome.want, ready, threshold), now)
        want = outcome.want if isinstance(outcome, scale_to_zero.Apply) else None
        if ready == live <= 1 and outcome.want <= 1 and spec.reachable and not minimum:
            return self._decide_last_replica(scale, want, level_changes, now)
        return want

    def _decide_last_replica(
        self, scale: ScaleSettings, want: int | None, level_changes: Callable[[], Sequence[LevelChange]], now: float
    ) -> int | Level | None:
        """Decide about the last replica. `want` is the KPA's decision: none, one, or no change (None)."""
        match scale.idle:
            case "zero":
                return want
            case "warm":
                return want or None
            case "sleep":
                return Level.ASLEEP if want == 0 else want
            case "sleep2":
                return Level.DEEP_SLEEP if want == 0 else want
            case "auto":
                idle_s = now - self.last_request_s
                level = level_after(level_changes(), idle_s) if idle_s >= MIN_IDLE_S else Level.WARM
        if level is Level.WARM:
            return want or None  # a replica that sleeps already (restart, or new prices) sleeps on
        self._set_activity(Activity.INACTIVE, now)
        return level

    def may_start(self, now: float, *, minimum: int) -> bool:
        """Return whether a start may be tried. After a failed one it needs a delay and a new request."""
        return now >= self._not_before_s and (not self._needs_request or self._may_retry(minimum, now))

    def retry_in_s(self, now: float) -> float:
        """Return the seconds until a requested start may be tried."""
        return max(0.0, self._not_before_s - now)

    def record_failed_start(self, now: float, *, at_zero: bool) -> None:
        """Record a failed start. The next one waits for a new request, and for FAILURE_SPACING_S at least."""
        self._needs_request = True
        self._not_before_s = now + FAILURE_SPACING_S
        if at_zero:
            self._set_activity(Activity.INACTIVE, now)

    def record_exit(self, now: float, *, served: bool) -> None:
        """Record a dead process. The first that was serving is replaced at once, then one per FAILURE_SPACING_S."""
        self._last_exit_s = now
        if served:
            due_s = now if self._replacement_due_s is None else self._replacement_due_s + FAILURE_SPACING_S
            self._replacement_due_s = min(max(due_s, now), now + FAILURE_SPACING_S)
            self._not_before_s = max(self._not_before_s, self._replacement_due_s)

    def record_slot_refusal(self, now: float) -> None:
        """Record that waiting requests failed because no device slot is free. New ones fail after FAILURE_SPACING_S at
        the earliest.
        """
        self.requested_us = None
        self._not_before_s = max(self._not_before_s, now + FAILURE_SPACING_S)

    def reset_demand(self, now: float, left: int) -> None:
        """Forget the traffic so far, because replicas were taken away and `left` of them stay. More start only on new
        requests.
        """
        self._stable = LinearWindow(self._window_s)
        self._panic = LinearWindow(panic_window_s(self._window_s, PANIC_WINDOW_PERCENT))
        self._kpa_state = kpa.initial_state(left, now)
        if left == 0:
            self._set_activity(Activity.INACTIVE, now)
            self._scaled_to_zero_s, self._has_ambiguous_report = now, False
            self.requested_us = None

    def is_forgettable(self, now: float) -> bool:
        """Return whether a new `VersionScaler` would decide the same."""
        if self._scaled_to_zero_s is not None:
            ended_s = (
                self._scaled_to_zero_s if self._last_exit_s is None else max(self._scaled_to_zero_s, self._last_exit_s)
            )
            if now < ended_s + LATE_REPORT_S:
                return False
        return self._activity is Activity.INACTIVE and self._stable.is_empty(now)

    def check_integrity(self) -> None:
        """Assert that the windows add up."""
        self._stable.check_integrity()
        self._panic.check_integrity()

    def _may_retry(self, minimum: int, now: float) -> bool:
        return minimum > 0 and now >= self._not_before_s - FAILURE_SPACING_S + MINIMUM_RETRY_S

    def _resize(self, window_s: float, now: float) -> None:
        if window_s != self._window_s:
            self._stable.resize(window_s, now)
            self._panic.resize(panic_window_s(window_s, PANIC_WINDOW_PERCENT), now)
            self._window_s = window_s

    def _set_activity(self, activity: Activity, now: float) -> None:
        if activity is not self._activity:
            self._activity, self._activity_since_s = activity, now
