"""How many requests this activator sends one replica at once, of the streams that the replica divides among activators.

The replica tells its credit with the head of each answer and with each refusal (`runtime/policy/credit.py` divides).
Where it has told nothing, or not lately, an activator takes the streams over the activators that it knows of.

A refusal means that all streams are taken just now. Then nothing is added until a pause is over, which doubles with
each refusal, and after it one request at a time until the replica takes one. So a full replica is asked a few times a
second. One that is at its credit tries one more when it has sent nothing for `TRY_S`: what it was told may be over.

Pure state; times are seconds of one clock.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

from activator.policy.places import share

TOLD_S: Final = 2.0  # for which a credit stands that is not told again
TRY_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.025
LONGEST_PAUSE_S: Final = 0.4  # less than the time for which a replica keeps a stream for one that it refused


@dataclass(slots=True)
class Credit:
    """Of one replica."""

    _told: int | None = None
    _told_s: float = -inf
    _sent_s: float = -inf
    _pause_s: float = 0.0  # 0: the last one was taken
    _paused_until_s: float = -inf

    def sent(self, now_s: float) -> None:
        """A request is on its way there."""
        self._sent_s = now_s

    def taken(self, told: int | None, now_s: float) -> None:
        """The replica answers, and tells this credit; None: it is of a build that knows no credit."""
        self._told, self._told_s = told, now_s
        if now_s >= self._paused_until_s:
            self._pause_s = 0.0

    def refused(self, told: int, now_s: float) -> None:
        """The replica is full. Requests that were sent together and are refused together make one pause."""
        self._told, self._told_s = told, now_s
        if now_s >= self._paused_until_s:
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._paused_until_s = now_s + self._pause_s

    def part(self, streams: int, members: int, now_s: float) -> int:
        """Return how many of its streams are for requests from here: its credit, or a share of them."""
        is_told = self._told is not None and now_s - self._told_s < TOLD_S
        part = self._told if self._told is not None and is_told else share(streams, members)
        return min(part, streams)

    def limit(self, streams: int, members: int, running: int, now_s: float) -> int:
        """Return how many requests it may have now from here, of which so many are there: its part, unless it refused
        or may be tried.
        """
        limit = self.part(streams, members, now_s)
        if now_s < self._paused_until_s:
            limit = min(limit, running)
        elif self._may_try(limit, running, now_s):
            limit = running + 1
        elif self._pause_s:
            limit = min(limit, running + 1)
        return min(limit, streams)

    def changes_s(self, now_s: float) -> float:
        """Return when `limit` may be another one without a word of the replica."""
        times = (self._paused_until_s, self._told_s + TOLD_S, self._sent_s + TRY_S)
        return min((time_s for time_s in times if time_s > now_s), default=inf)

    def _may_try(self, limit: int, running: int, now_s: float) -> bool:
        """A replica of an older build would not refuse what is too much, so it has to have told a credit once."""
        return running >= limit and self._told is not None and now_s - self._sent_s >= TRY_S
