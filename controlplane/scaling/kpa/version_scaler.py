"""One version under the autoscaler: its windows, what the KPA remembers, how active it is. Pure but for its own state.

It says how many replicas there should be; having them is the actuator's work, when to ask is the autoscaler's.
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
MINIMUM_RETRY_S: Final = 30.0  # a version with a minimum is tried again after so long, though nobody asks
LATE_REPORT_S: Final = 1.5  # reports come each second: what is reported so soon may be older than it looks


def scaling_spec(scale: ScaleSettings, max_streams: int, *, reachable: bool) -> ScalingSpec:
    """Knative's defaults, the version's streams as the hard limit per replica, the activator always in the path."""
    target, total = kpa.resolve_target(container_concurrency=max_streams, target=scale.target)
    return ScalingSpec(
        target_value=target,
        total_value=total,
        target_burst_capacity=-1.0,
        stable_window_s=scale.window_s,
        reachable=reachable,
    )


def idle_spec(scale: ScaleSettings, least: int, *, reachable: bool) -> IdleSpec:
    """Bounds and patience of a version."""
    return IdleSpec(
        min_scale=least,
        max_scale=scale.max,
        stable_window_s=scale.window_s,
        grace_s=scale.grace_s,
        reachable=reachable,
    )


def may_sleep(scale: ScaleSettings) -> bool:
    """Whether the last replica may be asleep rather than gone."""
    return scale.idle in ("sleep", "sleep2", "auto")


class VersionScaler:
    """A version that has replicas, wants some, or had traffic lately. Times are monotonic seconds."""

    def __init__(self, key: VersionKey, window_s: float, ready: int, now: float) -> None:
        self.key = key
        self._window_s = window_s
        self._stable = LinearWindow(window_s)
        self._panic = LinearWindow(panic_window_s(window_s, PANIC_WINDOW_PERCENT))
        self._kpa_state = kpa.initial_state(ready, now)
        self._activity = Activity.ACTIVE if ready else Activity.INACTIVE
        self._activity_since_s = now
        self._not_before_s = now
        self._last_exit_s: float | None = None  # a process of it died, for whatever reason
        self._replacement_due_s: float | None = None  # from when on the last that died while it served was made up for
        self._scaled_to_zero_s: float | None = (
            None  # when its replicas were taken away; late reports are about earlier requests
        )
        self._has_ambiguous_report = (
            False  # a report came so soon afterwards that its requests may be from before or after
        )
        self._needs_request = False
        self.last_request_s = now  # when it was last asked for
        self.requested_us: int | None = None  # since when a caller waits at zero

    def __repr__(self) -> str:
        emptied = "" if self._scaled_to_zero_s is None else " emptied"
        return f"<VersionScaler {self.key} {self._activity}{emptied}>"

    def record(self, concurrency: float, requests: int, present: int, now: float) -> bool:
        """Take in a report. Return whether callers want the version, beyond what is served to its end.

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
        """Return whether a report may be about requests from before the replicas were taken away. A request that waits
        is reported again.

        The announcement of a request that waits at zero is never doubtful. It is sent at once and again while the
        request waits, each time as exactly one request at concurrency one. If a caller may have come unannounced soon
        after the replicas went, later reports count as theirs.
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
        least: int,
        ready: int,
        live: int,
        level_changes: Callable[[], Sequence[LevelChange]],
        now: float,
    ) -> int | Level | None:
        """Return the replicas to have now, or the level at which the last one stays; None to leave the version as it
        is.

        `least` is the minimum that holds for the version now, which may be less than the model's setting.
        `level_changes` returns the levels by break-even.
        """
        if self._needs_request and live == 0 and not self._may_retry(least, now) and not may_sleep(model.scale):
            return 0  # nothing starts, and nothing sleeps on
        scale, reachable = model.scale, version.registration.version in model.named
        self._stable, self._panic = (
            convert_window(scale.average, self._stable),
            convert_window(scale.average, self._panic),
        )
        self._resize(scale.window_s, now)
        seen = Observation(stable=self._stable.average(now), panic=self._panic.average(now), ready_pods=ready)
        streams = version.registration.limits.max_streams
        decision = kpa.decide(scaling_spec(scale, streams, reachable=reachable), seen, self._kpa_state, now)
        self._kpa_state = decision.memory
        spec = idle_spec(scale, least, reachable=reachable)
        facts = IdleFacts(
            desired=decision.desired, activity=self._activity, since_s=self._activity_since_s, initialized=True
        )
        outcome = scale_to_zero.decide(spec, facts, now)
        threshold = scale_to_zero.active_threshold(spec, initialized=True)
        self._set_activity(scale_to_zero.next_activity(self._activity, outcome.want, ready, threshold), now)
        want = outcome.want if isinstance(outcome, scale_to_zero.Apply) else None
        if ready == live <= 1 and outcome.want <= 1 and spec.reachable and not least:
            return self._decide_last_replica(scale, want, level_changes, now)
        return want

    def _decide_last_replica(
        self, scale: ScaleSettings, want: int | None, level_changes: Callable[[], Sequence[LevelChange]], now: float
    ) -> int | Level | None:
        """What becomes of the last replica, where the KPA `want`s none or one."""
        match scale.idle:
            case "zero":
                return want
            case "warm":
                return want or None
            case "sleep":
                return Level.ASLEEP if want == 0 else want
            case "sleep2":
                return Level.ASLEEP2 if want == 0 else want
            case "auto":
                idle_s = now - self.last_request_s
                level = level_after(level_changes(), idle_s) if idle_s >= MIN_IDLE_S else Level.WARM
        if level is Level.WARM:
            return want or None  # what sleeps already, as seen from before a restart or other prices, sleeps on
        self._set_activity(Activity.INACTIVE, now)
        return level

    def may_start(self, now: float, *, least: int) -> bool:
        """Whether a start may be tried: not right after one failed, and then only once somebody asks again."""
        return now >= self._not_before_s and (not self._needs_request or self._may_retry(least, now))

    def retry_in_s(self, now: float) -> float:
        """Seconds until a start may be tried, should somebody ask."""
        return max(0.0, self._not_before_s - now)

    def record_failed_start(self, now: float, *, at_zero: bool) -> None:
        """Wait for the next poke, and for a second at least."""
        self._needs_request = True
        self._not_before_s = now + FAILURE_SPACING_S
        if at_zero:
            self._set_activity(Activity.INACTIVE, now)

    def record_exit(self, now: float, *, served: bool) -> None:
        """A process is dead. The first that died while it served is made up for at once, then one in a second."""
        self._last_exit_s = now
        if served:
            due_s = now if self._replacement_due_s is None else self._replacement_due_s + FAILURE_SPACING_S
            self._replacement_due_s = min(max(due_s, now), now + FAILURE_SPACING_S)
            self._not_before_s = max(self._not_before_s, self._replacement_due_s)

    def record_slot_refusal(self, now: float) -> None:
        """Record that waiting requests were told that there is no device slot. New ones are told after
        FAILURE_SPACING_S at the earliest.
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
        """Whether nothing would be lost by making it anew."""
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

    def _may_retry(self, least: int, now: float) -> bool:
        return least > 0 and now >= self._not_before_s - FAILURE_SPACING_S + MINIMUM_RETRY_S

    def _resize(self, window_s: float, now: float) -> None:
        if window_s != self._window_s:
            self._stable.resize(window_s, now)
            self._panic.resize(panic_window_s(window_s, PANIC_WINDOW_PERCENT), now)
            self._window_s = window_s

    def _set_activity(self, activity: Activity, now: float) -> None:
        if activity is not self._activity:
            self._activity, self._activity_since_s = activity, now
