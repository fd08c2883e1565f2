"""The concurrency that is reported of one version, weighted by time, and by tokens if its model scales by them.

Source: knative/serving, pkg/activator/handler/concurrency_reporter.go and pkg/http/stats. What was announced at once
(one request, concurrency 1) is taken off the next report: reports of one second add at the decider.

By tokens a version is reported as many requests at once as what is inside amounts to. The decider wants so many
replicas as `reported / (0.7 x target)`, whatever a request takes. One of which `n` tokens are left holds its slot for
`n / p` seconds, where `p` is what a slot was measured to compute in a second; it counts as `n / (p x backlog_s)`. So a
replica at its target, `target` slots that compute `target x p` a second, has `backlog_s` seconds before it, and what is
inside that would take it longer asks for more of them, in proportion. It is never less than the requests themselves:
they hold slots, of which a replica has so many, however little they are.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from activator.queue.policy.wait_estimate import MeasuredThroughput

MAX_CONCURRENCY: Final = 1e6  # requests at once: no fleet serves more, and what is reported is a number


@dataclass(frozen=True, slots=True)
class ConcurrencyReport:
    """Average concurrency and requests since the last report."""

    concurrency: float
    requests: int


# A poke says that somebody waits, each time anew. Were the request counted the first time only, a decider that was
# restarted in between could not tell a request that waits from one that an earlier replica still serves.
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
        """Nothing ran before `now`."""
        return cls(since_s=now, changed_s=now)

    def begin(self, now: float) -> None:
        """A request arrived."""
        self._advance(now)
        self.running += 1
        self._requests += 1

    def end(self, now: float) -> None:
        """A request left."""
        assert self.running > 0
        self._advance(now)
        self.running -= 1

    def announce(self) -> None:
        """Take one ANNOUNCEMENT off the next report."""
        self._announced += 1

    def withdraw(self) -> None:
        """Forget an announcement that reached nobody: the next report is not less by it."""
        self._announced = max(0, self._announced - 1)

    def report(self, now: float, weigh: Callable[[float], float] = lambda average: average) -> ConcurrencyReport:
        """What happened since the last report, without what was announced (never below nothing). `weigh`: what the
        average of the requests is reported as.
        """
        self._advance(now)
        seconds = now - self.since_s
        average = weigh(self._integral / seconds if seconds > 0 else 0.0)
        seen = ConcurrencyReport(max(0.0, average - self._announced), max(0, self._requests - self._announced))
        self.since_s = now
        self._integral, self._requests, self._announced = 0.0, 0, 0
        return seen

    def idle_since_report(self) -> bool:
        """Whether nothing runs and nothing has run since the last report."""
        return self.running == 0 and self._requests == 0 and self._integral == 0.0

    def _advance(self, now: float) -> None:
        self._integral += self.running * (now - self.changed_s)
        self.changed_s = now


class RequestProgress(NamedTuple):
    """A request that waits or runs: tokens as they were estimated, and those that were computed so far."""

    estimated: int
    computed: int


def left(each: RequestProgress, share: float) -> float:
    """Tokens that are still to be computed, where answers take `share` of what is estimated; never below 0."""
    return max(0.0, each.estimated * share - each.computed)


def weighed(
    concurrency: float,
    inside: Iterable[RequestProgress],
    waiting: int,
    measured: MeasuredThroughput | None,
    backlog_s: float,
) -> float:
    """Requests at once. `concurrency` itself where nothing was measured, or `backlog_s` is 0; never less than that, nor
    than 1 while any are `waiting`.
    """
    if measured is None or backlog_s <= 0:
        return concurrency
    tokens = sum(left(each, measured.share) for each in inside)
    if not tokens:
        return max(concurrency, 1.0 if waiting else 0.0)
    of_one = measured.tokens_per_s * backlog_s
    by_tokens = tokens / of_one if tokens < MAX_CONCURRENCY * of_one else MAX_CONCURRENCY
    return max(concurrency, by_tokens, 1.0 if waiting else 0.0)
