"""Limit how many requests this activator sends to one replica at once, when several activators share its streams.

The replica reports the activator's credit in each response head and in each refusal
(`runtime/lifecycle/credit_policy.py` divides the streams). Without a recent credit, the limit is the streams divided by
the known activators.

A refusal means that all streams are taken now. The limit then does not rise until a pause is over, and the pause
doubles with each refusal. After the pause, one request at a time is added until the replica accepts one. So a full
replica gets a few requests per second. An activator that has used its whole credit tries one request more when it has
sent nothing for `TRY_S`, because the credit may be out of date.

Pure state; times are seconds of one clock.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

from activator.limits.policy.held_quota import equal_share

CREDIT_VALID_S: Final = 2.0  # a credit is valid for so long
TRY_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.025
LONGEST_PAUSE_S: Final = 0.4  # less than the time for which a replica reserves a stream after a refusal


@dataclass(slots=True)
class ReplicaCredit:
    """The credit that one replica reported to this activator, and the pause after its refusals."""

    _credit: int | None = None
    _credit_at_s: float = -inf
    _sent_s: float = -inf
    _pause_s: float = 0.0  # 0: the last request was accepted
    _paused_until_s: float = -inf

    def record_sent(self, now_s: float) -> None:
        """Record that a request is sent to the replica."""
        self._sent_s = now_s

    def record_answer(self, credit: int | None, now_s: float) -> None:
        """Record a response head and its credit. None: the replica's build does not report credits."""
        self._credit, self._credit_at_s = credit, now_s
        if now_s >= self._paused_until_s:
            self._pause_s = 0.0

    def record_refusal(self, credit: int, now_s: float) -> None:
        """Record a refusal and its credit. Refusals during a pause do not prolong it."""
        self._credit, self._credit_at_s = credit, now_s
        if now_s >= self._paused_until_s:
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._paused_until_s = now_s + self._pause_s

    def credited_slots(self, streams: int, members: int, now_s: float) -> int:
        """Return how many of the replica's `streams` are for this activator: its credit, else 1/`members` of them."""
        is_recent = self._credit is not None and now_s - self._credit_at_s < CREDIT_VALID_S
        part = self._credit if self._credit is not None and is_recent else equal_share(streams, members)
        return min(part, streams)

    def limit(self, streams: int, members: int, running: int, now_s: float) -> int:
        """Return how many requests this activator may have at the replica now. It has `running` there.

        1. A pause after a refusal: no more than are running.
        2. The credit may be out of date: one more than are running.
        3. The last request was refused: one more than are running, within the credit.
        4. Otherwise the credit.
        """
        limit = self.credited_slots(streams, members, now_s)
        # (1)
        if now_s < self._paused_until_s:
            limit = min(limit, running)
        # (2)
        elif self._may_try(limit, running, now_s):
            limit = running + 1
        # (3)
        elif self._pause_s:
            limit = min(limit, running + 1)
        return min(limit, streams)

    def next_change_s(self, now_s: float) -> float:
        """Return when `limit` may change without news from the replica; inf if never."""
        times = (self._paused_until_s, self._credit_at_s + CREDIT_VALID_S, self._sent_s + TRY_S)
        return min((time_s for time_s in times if time_s > now_s), default=inf)

    def _may_try(self, limit: int, running: int, now_s: float) -> bool:
        """Return whether to try one more request. A replica that reports no credit would queue it, not refuse it."""
        return running >= limit and self._credit is not None and now_s - self._sent_s >= TRY_S
