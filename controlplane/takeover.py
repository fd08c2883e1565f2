"""Tell idleness from silence after a control plane took over: it knows what runs, but not yet what is in use."""

from collections.abc import Callable
from typing import Final

from controlplane.facts import Model
from controlplane.feed import REMEMBERED_S
from controlplane.policy.idle import LOCAL_WINDOW_MAX_S
from controlplane.policy.reclaim import MIN_IDLE_S

_RECORD_S: Final = LOCAL_WINDOW_MAX_S  # after so long every stable window is over, and nobody asks who has reported


class Takeover:
    """What this control plane has heard of activators since it began. Times are monotonic seconds.

    `readers` names the activators that read the feed, or left so lately that they are expected back.
    """

    def __init__(self, readers: Callable[[], set[str]]) -> None:
        self._readers = readers
        self._began_s: float | None = None  # since when activators can report
        self._heard_s: dict[str, float] = {}  # activator -> its first report

    def __repr__(self) -> str:
        return f"<Takeover began={self._began_s} heard={len(self._heard_s)}>"

    def begin(self, now: float) -> None:
        """Activators can report from now on. Idempotent."""
        if self._began_s is None:
            self._began_s = now

    def heard(self, activator: str, now: float) -> None:
        """An activator has reported."""
        if self._began_s is None or now < self._began_s + _RECORD_S:
            self._heard_s.setdefault(activator, now)

    def is_window_over(self, model: Model, now: float) -> bool:
        """Return whether activators could report for a whole stable window of the model."""
        return self._began_s is not None and now - self._began_s >= model.scale.window_s

    def is_known(self, model: Model, now: float) -> bool:
        """Return whether a model of which nothing is reported is idle."""
        if self.is_window_over(model, now):
            return True
        if self._began_s is None or now - self._began_s < REMEMBERED_S:
            return False  # activators are still coming back
        # An activator reports everything that runs each second, so within MIN_IDLE_S of its first report.
        readers = self._readers()
        return bool(readers) and all(now - self._heard_s.get(name, now) >= MIN_IDLE_S for name in readers)
