"""What a tenant has left of its month's budget: the ledger's sum, records it lacks, requests under way. Pure state.

A request holds the most that it may cost until its record is durable, and counts for what that says until the ledger
has it. So one activator never passes a budget, but for what only the ledger knows: device time, other activators'
records on their way (unless they lease from one store: `held_quota`). What a request may cost at most is `body`'s.
"""

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

from kelvin.contracts.accounting.spending import SpendingRow

_SHORTEST_US: Final = 28 * 86_400_000_000  # of months
UNSEEN: Final = 4096  # records that are told apart; beyond it those that came last count as one


class _Unseen(NamedTuple):
    """Records of ours that the ledger's sum lacks."""

    sequence: int  # of the last of them
    ended_at_us: int
    micros: int


@dataclass(slots=True)
class TenantSpending:
    """One tenant's. `source` is our spool's name. Times are of the wall clock, microseconds since 1970."""

    source: str
    row: SpendingRow | None = None
    held_micros: int = 0
    handed_over_micros: int = 0  # in all: records that were ours to count, and are in the ledger's sum since
    _unseen: deque[_Unseen] = field(default_factory=deque)
    _unseen_sum_micros: int = 0  # sum over `_unseen`, which each request needs
    _before_micros: int | None = None  # spent in the month before the row's; None: unknown

    def apply_ledger_row(self, row: SpendingRow) -> None:
        """Take in the ledger's sum. Records that it contains are no longer counted here.

        The row may be of a month that has not begun by our clock. Until then records count in the month before it.
        """
        before = _month_beside(row.month, -1)
        is_told = before in row.beside
        if is_told:
            self._before_micros = row.beside[before]
        elif self.row is not None and self.row.month == before:
            self._before_micros = self.row.spent_micros
        elif self.row is None or self.row.month != row.month:
            self._before_micros = None
        self.row = row
        seen = row.seen.get(self.source, 0)
        while self._unseen and self._unseen[0].sequence <= seen:
            record = self._unseen.popleft()
            self._unseen_sum_micros -= record.micros
            self.handed_over_micros += record.micros
            if self._before_micros is not None and not is_told and record.ended_at_us < _begins_us(row.month):
                self._before_micros += record.micros

    def spent_micros(self, now_us: int) -> int:
        """Of the month that it is now; 0 before the ledger said anything."""
        return self.known_micros(now_us) + self._unseen_micros(now_us)

    def known_micros(self, now_us: int) -> int:
        """Of it what the ledger told."""
        if self.row is None:
            return 0
        if self._is_before(now_us):
            assert self._before_micros is not None
            return self._before_micros
        if now_us >= self.row.ends_at_us:
            return self.row.beside.get(_month_beside(self.row.month, 1), 0)
        return self.row.spent_micros

    def month_at(self, now_us: int) -> str:
        """Return the month, YYYY-MM in UTC, that `known_micros` is about. Call it after `apply_ledger_row`."""
        assert self.row is not None, "nothing costs anything yet"
        if self._is_before(now_us):
            return _month_beside(self.row.month, -1)
        return self.row.month if now_us < self.row.ends_at_us else _month_beside(self.row.month, 1)

    def own_micros(self, now_us: int) -> int:
        """What the ledger lacks of this month: requests under way, at their most, and records."""
        return self.held_micros + self._unseen_micros(now_us)

    def covers(self, budget_micros: int, micros: int, now_us: int) -> bool:
        """Whether so much is left for a request. With nothing left nobody enters, whatever it may cost."""
        taken = self.spent_micros(now_us) + self.held_micros
        return taken < budget_micros and taken + micros <= budget_micros

    def try_hold(self, budget_micros: int, micros: int, now_us: int) -> bool:
        """Hold so much for a request, if that is left; then `settle` or `release` is owed."""
        if not self.covers(budget_micros, micros, now_us):
            return False
        self.held_micros += micros
        return True

    def release(self, held_micros: int) -> None:
        """A request of which there will be no record."""
        assert 0 <= held_micros <= self.held_micros
        self.held_micros -= held_micros

    def settle(self, held_micros: int, micros: int, sequence: int, ended_at_us: int) -> None:
        """A request's record is durable, and says so much. Sequences ascend, but for those that wait side by side."""
        self.release(held_micros)
        if self.row is not None and sequence <= self.row.seen.get(self.source, 0):
            self.handed_over_micros += micros
            return
        self._unseen_sum_micros += micros
        if len(self._unseen) < UNSEEN:
            self._unseen.append(_Unseen(max(sequence, self._last()), ended_at_us, micros))
        else:
            last = self._unseen.pop()
            self._unseen.append(_Unseen(max(sequence, last.sequence), ended_at_us, last.micros + micros))

    def _is_before(self, now_us: int) -> bool:
        """Return whether the row's month has not begun by our clock, and the month before it is known."""
        if self.row is None or self._before_micros is None or now_us >= self.row.ends_at_us - _SHORTEST_US:
            return False
        return now_us < _begins_us(self.row.month)

    def _unseen_micros(self, now_us: int) -> int:
        if self.row is None:
            return 0
        if now_us >= self.row.ends_at_us:  # a month began of which the ledger has not told
            return sum(each.micros for each in self._unseen if each.ended_at_us >= self.row.ends_at_us)
        return self._unseen_sum_micros

    def _last(self) -> int:
        return self._unseen[-1].sequence if self._unseen else 0

    @property
    def unseen(self) -> int:
        """How many entries are kept."""
        return len(self._unseen)


def _month_beside(month: str, step: int) -> str:
    """Return the month after (`step` 1) or before (-1)."""
    count = int(month[:4]) * 12 + int(month[5:]) - 1 + step
    return f"{count // 12:04}-{count % 12 + 1:02}"


def _begins_us(month: str) -> int:
    return int(datetime(int(month[:4]), int(month[5:]), 1, tzinfo=UTC).timestamp()) * 1_000_000
