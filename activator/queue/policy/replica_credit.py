"""How many requests this activator sends one replica at once, of the streams that the replica divides among activators.

The replica tells the activator its credit with the head of each answer and with each refusal
(`runtime/lifecycle/credit_policy.py` divides). Without a credit, or with an old one, the limit is the streams divided
by the activators that this one knows of.

A refusal means that all streams are taken just now. The limit then doesn't rise until a pause is over; the pause
doubles with each refusal. After it one request at a time is added until the replica takes one. So a full replica is
asked a few times a second. An activator that is at its credit tries one request more when it has sent nothing for
`TRY_S`, because the credit may be out of date.

Pure state; times are seconds of one clock.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

from activator.limits.policy.held_quota import equal_share

TOLD_S: Final = 2.0  # for which a credit stands that is not told again
TRY_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.025
LONGEST_PAUSE_S: Final = 0.4  # less than the time for which a replica keeps a stream for one that it refused


@dataclass(slots=True)
class ReplicaCredit:
    """The credit that one replica told this activator, and the pause after its refusals."""

    _told: int | None = None
    _told_s: float = -inf
    _sent_s: float = -inf
    _pause_s: float = 0.0  # 0: the last one was taken
    _paused_until_s: float = -inf

    def record_sent(self, now_s: float) -> None:
        """Record that a request is sent to the replica."""
        self._sent_s = now_s

    def record_answer(self, told: int | None, now_s: float) -> None:
        """Record an answer's head and the credit in it. None: the replica is of a build that knows no credit."""
        self._told, self._told_s = told, now_s
        if now_s >= self._paused_until_s:
            self._pause_s = 0.0

    def record_refusal(self, told: int, now_s: float) -> None:
        """Record a refusal and the credit in it. Requests that are refused together make one pause."""
        self._told, self._told_s = told, now_s
        if now_s >= self._paused_until_s:
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._paused_until_s = now_s + self._pause_s

    def credited_slots(self, streams: int, members: int, now_s: float) -> int:
        """Return how many of the replica's `streams` are for this activator, which is one of `members`: the credit that
        it was told, else a share.
        """
        is_told = self._told is not None and now_s - self._told_s < TOLD_S
        part = self._told if self._told is not None and is_told else equal_share(streams, members)
        return min(part, streams)

    def limit(self, streams: int, members: int, running: int, now_s: float) -> int:
        """Return how many requests this activator may have at the replica now: its part, unless the replica refused one
        or may be tried. It has `running` there.
        """
        limit = self.credited_slots(streams, members, now_s)
        if now_s < self._paused_until_s:
            limit = min(limit, running)
        elif self._may_try(limit, running, now_s):
            limit = running + 1
        elif self._pause_s:
            limit = min(limit, running + 1)
        return min(limit, streams)

    def next_change_s(self, now_s: float) -> float:
        """Return when `limit` may change although the replica tells nothing; inf if never."""
        times = (self._paused_until_s, self._told_s + TOLD_S, self._sent_s + TRY_S)
        return min((time_s for time_s in times if time_s > now_s), default=inf)

    def _may_try(self, limit: int, running: int, now_s: float) -> bool:
        """Return whether to try one request more. Only a replica that tells a credit would refuse it if it is full."""
        return running >= limit and self._told is not None and now_s - self._sent_s >= TRY_S
