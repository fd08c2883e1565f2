"""Track which activators have reported, to tell an idle model from an unreported one after a takeover."""

from collections.abc import Callable
from typing import Final

from controlplane.registry.feed_hub import RECONNECT_S
from controlplane.registry.policy.domain import Model
from controlplane.scaling.policy.reclaim import MIN_IDLE_S
from controlplane.scaling.policy.scale_to_zero import LOCAL_WINDOW_MAX_S

_RECORD_S: Final = LOCAL_WINDOW_MAX_S  # by then every stable window is over, and reports no longer matter


class ReportCoverage:
    """The activators that have reported since this control plane began. Times are monotonic seconds.

    `readers` returns the activators that read the feed, or left it so recently that they are expected back.
    """

    def __init__(self, readers: Callable[[], set[str]]) -> None:
        self._readers = readers
        self._began_s: float | None = None  # when activators could first report
        self._first_report_s: dict[str, float] = {}  # activator -> its first report

    def __repr__(self) -> str:
        return f"<ReportCoverage began={self._began_s} reported={len(self._first_report_s)}>"

    def start(self, now: float) -> None:
        """Record that activators can report from now on. Idempotent."""
        if self._began_s is None:
            self._began_s = now

    def record_report(self, activator: str, now: float) -> None:
        """Record an activator's first report."""
        if self._began_s is None or now < self._began_s + _RECORD_S:
            self._first_report_s.setdefault(activator, now)

    def is_window_over(self, model: Model, now: float) -> bool:
        """Return whether activators had a whole stable window of the model to report."""
        return self._began_s is not None and now - self._began_s >= model.scale.window_s

    def is_known_idle(self, model: Model, now: float) -> bool:
        """Return whether a model without reports is known to be idle."""
        if self.is_window_over(model, now):
            return True
        if self._began_s is None or now - self._began_s < RECONNECT_S:
            return False  # activators are still coming back
        # Each second an activator reports all models in use, so all of them within MIN_IDLE_S of its first report.
        readers = self._readers()
        return bool(readers) and all(now - self._first_report_s.get(name, now) >= MIN_IDLE_S for name in readers)
