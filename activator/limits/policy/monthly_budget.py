"""A tenant's monthly budget: the ledger's sum, records that the ledger lacks, and running requests. Pure state.

A running request holds the most that it may cost. Its durable record then counts until the ledger has it. So one
activator never exceeds a budget, except for costs that only the ledger knows: device time, and other activators'
records on their way. With a shared store, `held_quota.py` bounds the latter, too. `routing/policy/request_body.py`
estimates the most that a request may cost.
"""

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

from kelvin.contracts.accounting.spending import SpendingRow

_SHORTEST_US: Final = 28 * 86_400_000_000  # the shortest month
MAX_UNREPORTED: Final = 4096  # bound on separate records; above it the newest are merged


class _UnreportedRecords(NamedTuple):
    """Records of this activator that the ledger's sum lacks."""

    sequence: int  # of the last record
    ended_at_us: int
    micros: int


@dataclass(slots=True)
class TenantSpending:
    """One tenant's spending. `source` is our spool's name. Times are wall-clock microseconds since 1970."""

    source: str
    row: SpendingRow | None = None
    held_micros: int = 0
    handed_over_micros: int = 0  # total of our records that are now in the ledger's sum
    _unreported: deque[_UnreportedRecords] = field(default_factory=deque)
    _unreported_sum_micros: int = 0  # sum of `_unreported`, kept because each request needs it
    _previous_month_micros: int | None = None  # spent in the month before the row's month; None: unknown

    def apply_ledger_row(self, row: SpendingRow) -> None:
        """Apply the ledger's sum. Records that it contains are no longer counted here. The row may be of a month that
        has not begun by our clock. Until then records count in the month before it.
        """
        previous_month = _adjacent_month(row.month, -1)
        is_reported = previous_month in row.beside
        if is_reported:
            self._previous_month_micros = row.beside[previous_month]
        elif self.row is not None and self.row.month == previous_month:
            self._previous_month_micros = self.row.spent_micros
        elif self.row is None or self.row.month != row.month:
            self._previous_month_micros = None
        self.row = row
        included = row.seen.get(self.source, 0)
        while self._unreported and self._unreported[0].sequence <= included:
            record = self._unreported.popleft()
            self._unreported_sum_micros -= record.micros
            self.handed_over_micros += record.micros
            if (
                self._previous_month_micros is not None
                and not is_reported
                and record.ended_at_us < _month_start_us(row.month)
            ):
                self._previous_month_micros += record.micros

    def spent_micros(self, now_us: int) -> int:
        """Return what was spent in the current month; 0 before the first row."""
        return self.ledger_micros(now_us) + self._unreported_micros(now_us)

    def ledger_micros(self, now_us: int) -> int:
        """Return the ledger's sum for the current month."""
        if self.row is None:
            return 0
        if self._is_previous_month(now_us):
            assert self._previous_month_micros is not None
            return self._previous_month_micros
        if now_us >= self.row.ends_at_us:
            return self.row.beside.get(_adjacent_month(self.row.month, 1), 0)
        return self.row.spent_micros

    def month_at(self, now_us: int) -> str:
        """Return the month, YYYY-MM in UTC, that `ledger_micros` is about. Call it after `apply_ledger_row`."""
        assert self.row is not None, "nothing costs anything yet"
        if self._is_previous_month(now_us):
            return _adjacent_month(self.row.month, -1)
        return self.row.month if now_us < self.row.ends_at_us else _adjacent_month(self.row.month, 1)

    def local_micros(self, now_us: int) -> int:
        """Return what the ledger lacks of the current month: running requests at their most, and records."""
        return self.held_micros + self._unreported_micros(now_us)

    def covers(self, budget_micros: int, micros: int, now_us: int) -> bool:
        """Return whether the budget covers `micros` more. A used-up budget admits no request, whatever it costs."""
        committed = self.spent_micros(now_us) + self.held_micros
        return committed < budget_micros and committed + micros <= budget_micros

    def try_hold(self, budget_micros: int, micros: int, now_us: int) -> bool:
        """Hold `micros` for a request if the budget covers them. Call `settle` or `release` later."""
        if not self.covers(budget_micros, micros, now_us):
            return False
        self.held_micros += micros
        return True

    def release(self, held_micros: int) -> None:
        """Release what a request held that leaves no record."""
        assert 0 <= held_micros <= self.held_micros
        self.held_micros -= held_micros

    def settle(self, held_micros: int, micros: int, sequence: int, ended_at_us: int) -> None:
        """Count a request's durable record instead of what it held. Sequences ascend, except for concurrent records."""
        self.release(held_micros)
        if self.row is not None and sequence <= self.row.seen.get(self.source, 0):
            self.handed_over_micros += micros
            return
        self._unreported_sum_micros += micros
        if len(self._unreported) < MAX_UNREPORTED:
            self._unreported.append(_UnreportedRecords(max(sequence, self._last_sequence()), ended_at_us, micros))
        else:
            last = self._unreported.pop()
            self._unreported.append(_UnreportedRecords(max(sequence, last.sequence), ended_at_us, last.micros + micros))

    def _is_previous_month(self, now_us: int) -> bool:
        """Return whether the row's month has not begun by our clock, and the month before it is known."""
        if self.row is None or self._previous_month_micros is None or now_us >= self.row.ends_at_us - _SHORTEST_US:
            return False
        return now_us < _month_start_us(self.row.month)

    def _unreported_micros(self, now_us: int) -> int:
        if self.row is None:
            return 0
        if now_us >= self.row.ends_at_us:  # a new month has begun that the ledger has not reported
            return sum(each.micros for each in self._unreported if each.ended_at_us >= self.row.ends_at_us)
        return self._unreported_sum_micros

    def _last_sequence(self) -> int:
        return self._unreported[-1].sequence if self._unreported else 0

    @property
    def unreported_count(self) -> int:
        """Number of separate records that the ledger lacks."""
        return len(self._unreported)


def _adjacent_month(month: str, step: int) -> str:
    """Return the month after (`step` 1) or before (-1)."""
    count = int(month[:4]) * 12 + int(month[5:]) - 1 + step
    return f"{count // 12:04}-{count % 12 + 1:02}"


def _month_start_us(month: str) -> int:
    return int(datetime(int(month[:4]), int(month[5:]), 1, tzinfo=UTC).timestamp()) * 1_000_000
