"""The reported concurrency of one version: a time-weighted average, weighed by tokens if its model scales by them.

Source: knative/serving, pkg/activator/handler/concurrency_reporter.go and pkg/http/stats. An announced request
(concurrency 1) is subtracted from the next report, because the autoscaler adds the reports of one second.

Scaling by tokens reports the concurrency to which the requests inside amount. The autoscaler wants `reported / (0.7 x
target)` replicas, whatever a request takes. A request with `n` tokens left holds its slot for `n / p` seconds, where
`p` is the measured tokens per second of a slot. It counts as `n / (p x backlog_s)`. So a replica at its target, with
`target` slots that compute `target x p` tokens per second, has `backlog_s` seconds of work. A longer backlog asks for
proportionally more replicas. The reported value is never below the number of requests, since each holds a slot, however
small it is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from activator.queue.policy.wait_estimate import MeasuredThroughput

MAX_CONCURRENCY: Final = 1e6  # upper bound of a report: no fleet serves more


@dataclass(frozen=True, slots=True)
class ConcurrencyReport:
    """Average concurrency and requests since the last report."""

    concurrency: float
    requests: int


# Each wake report says that a request waits. If only the first one counted the request, a restarted autoscaler could
# not tell a waiting request from one that an earlier replica still serves.
ANNOUNCEMENT: Final = ConcurrencyReport(1.0, 1)


@dataclass(slots=True)
class ConcurrencyMeter:
    """One version's requests at this activator. Times are monotonic seconds."""

    since_s: float
    changed_s: float
    running: int = 0
    _integral: float = 0.0
    _requests: int = 0
    _announced: int = 0

    @classmethod
    def starting(cls, now: float) -> "ConcurrencyMeter":
        """Return a meter that starts idle at `now`."""
        return cls(since_s=now, changed_s=now)

    def begin(self, now: float) -> None:
        """Count a request that arrived."""
        self._advance(now)
        self.running += 1
        self._requests += 1

    def end(self, now: float) -> None:
        """Count a request that left."""
        assert self.running > 0
        self._advance(now)
        self.running -= 1

    def announce(self) -> None:
        """Subtract one ANNOUNCEMENT from the next report."""
        self._announced += 1

    def withdraw_announcement(self) -> None:
        """Undo an `announce` whose report was not delivered."""
        self._announced = max(0, self._announced - 1)

    def report(self, now: float, weigh: Callable[[float], float] = lambda average: average) -> ConcurrencyReport:
        """Return the concurrency and requests since the last report, minus what was announced; never below 0. `weigh`
        maps the average concurrency to the reported one.
        """
        self._advance(now)
        seconds = now - self.since_s
        average = weigh(self._integral / seconds if seconds > 0 else 0.0)
        report = ConcurrencyReport(max(0.0, average - self._announced), max(0, self._requests - self._announced))
        self.since_s = now
        self._integral, self._requests, self._announced = 0.0, 0, 0
        return report

    def was_idle_since_report(self) -> bool:
        """Return whether nothing runs and nothing has run since the last report."""
        return self.running == 0 and self._requests == 0 and self._integral == 0.0

    def _advance(self, now: float) -> None:
        self._integral += self.running * (now - self.changed_s)
        self.changed_s = now


class RequestProgress(NamedTuple):
    """A request inside: its estimated tokens, and those computed so far."""

    estimated: int
    computed: int


def remaining_tokens(progress: RequestProgress, actual_per_estimated: float) -> float:
    """Return the tokens still to compute if answers take `actual_per_estimated` of their estimate; never below 0."""
    return max(0.0, progress.estimated * actual_per_estimated - progress.computed)


def concurrency_by_tokens(
    concurrency: float,
    inside: Iterable[RequestProgress],
    waiting: int,
    measured: MeasuredThroughput | None,
    backlog_s: float,
) -> float:
    """Return the concurrency to report: at least `concurrency`, and at least 1 while requests are `waiting`. Returns
    `concurrency` itself if nothing was measured, or if `backlog_s` is 0.
    """
    if measured is None or backlog_s <= 0:
        return concurrency
    tokens = sum(remaining_tokens(each, measured.actual_per_estimated) for each in inside)
    if not tokens:
        return max(concurrency, 1.0 if waiting else 0.0)
    tokens_per_unit = measured.tokens_per_s * backlog_s
    by_tokens = tokens / tokens_per_unit if tokens < MAX_CONCURRENCY * tokens_per_unit else MAX_CONCURRENCY
    return max(concurrency, by_tokens, 1.0 if waiting else 0.0)
