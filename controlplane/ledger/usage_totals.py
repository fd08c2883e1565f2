"""Store the totals that bills are made of, in the transaction of the records. `policy/booking.py` computes them."""

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Executable, Table, bindparam, case, delete

from controlplane.db.dialects import Insert, upserts
from controlplane.db.ledger_schema import device_totals, request_totals, runtime_totals, step_totals
from controlplane.ledger.policy.booking import (
    DeviceKey,
    LedgerRecord,
    StepKey,
    SumKey,
    device_sums,
    request_sums,
    runtime_uses,
    step_sums,
)
from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.names import split_qualified_name

REQUEST_FIGURES: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
STEP_FIGURES: Final = ("requests",)
DEVICE_FIGURES: Final = ("lifetimes", "restore_us", "active_us", "idle_us")
RUNTIME_FIGURES: Final = ("requests", "answered", "device_us")


class UsageTotals:
    """Changes of totals by one transaction. Its size is the batch's days, models, outcomes and runtimes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._requests: defaultdict[SumKey, list[int]] = defaultdict(lambda: [0] * len(REQUEST_FIGURES))
        self._steps: defaultdict[StepKey, int] = defaultdict(int)
        self._devices: defaultdict[DeviceKey, list[int]] = defaultdict(lambda: [0] * len(DEVICE_FIGURES))
        self._runtimes: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(RUNTIME_FIGURES))
        self._spans: dict[tuple[str, str], tuple[int, int]] = {}
        self._owners: dict[tuple[str, str], str] = {}  # owners of replicas that served another tenant

    def add_requests(self, before: Sequence[LedgerRecord], after: Sequence[LedgerRecord]) -> None:
        """Add the change of one request: all its records before and after. New records come last in `after`."""
        for sign, group in ((-1, before), (1, after)) if before else ((1, after),):
            for key, figures in request_sums(group).items():
                _add(self._requests[key], figures, sign)
            for step, count in step_sums(group).items():
                self._steps[step] += sign * count
            for runtime_id, use in runtime_uses(booked.record for booked in group).items():
                _add(self._runtimes[runtime_id, after[0].record.tenant], use, sign)
        for booked in after[len(before) :]:
            record = booked.record
            if record.runtime_id is not None:
                name, at_us = (record.runtime_id, record.tenant), record.ended_at_us
                first, last = self._spans.get(name, (at_us, at_us))
                self._spans[name] = min(first, at_us), max(last, at_us)
                owner, _ = split_qualified_name(record.tenant, record.model)
                if owner != record.tenant:
                    self._owners[name] = owner

    def add_lifetime(self, record: LifetimeRecord, month: str) -> None:
        """Add a replica's life."""
        for key, figures in device_sums(record, month).items():
            _add(self._devices[key], figures, 1)

    def write(self) -> None:
        """Store the changes. A total of zero has no row, so order and repeats of batches leave no trace."""
        requests = {_request_name(key): sums for key, sums in self._requests.items() if any(sums)}
        steps = {_step_name(key): (count,) for key, count in self._steps.items() if count}
        devices = {_device_name(key): sums for key, sums in self._devices.items()}
        # A runtime without a span has no new records.
        uses = {
            name: [*use, *self._spans[name], self._owners.get(name)]
            for name, use in self._runtimes.items()
            if name in self._spans
        }
        _REQUESTS.run(self._connection, requests)
        _STEPS.run(self._connection, steps)
        _DEVICES.run(self._connection, devices)
        _RUNTIMES.run(self._connection, uses)


class TotalsUpsert:
    """Adds figures to rows of a table, and inserts missing rows. `fixed` columns keep their first value."""

    def __init__(
        self,
        table: Table,
        names: Sequence[str],
        figures: Sequence[str],
        span: Sequence[str] = (),
        fixed: Sequence[str] = (),
    ) -> None:
        self._statements = upserts(table, lambda new: _upsert_statement(new, table, names, figures, span))
        self._columns = (*names, *figures, *span, *fixed)
        same = [table.c[name] == bindparam(f"of_{name}") for name in names]
        self._delete_zero = delete(table).where(*same, *(table.c[name] == 0 for name in figures))
        self._names = names

    def run(self, connection: Connection, sums: Mapping[tuple[Any, ...], Sequence[Any]]) -> None:
        """Add `sums`: by the row's key its figures, then its span and fixed values, if the table has them."""
        if not sums:
            return
        rows = [dict(zip(self._columns, (*name, *figures), strict=True)) for name, figures in sums.items()]
        connection.execute(self._statements[connection.dialect.name], rows)
        # Delete rows that are zero now: a batch may add what an earlier batch took back.
        named = [f"of_{name}" for name in self._names]
        connection.execute(self._delete_zero, [dict(zip(named, name, strict=True)) for name in sums])


def _upsert_statement(
    new: Insert, table: Table, names: Sequence[str], figures: Sequence[str], span: Sequence[str]
) -> Executable:
    changes: dict[str, ColumnElement[Any]] = {name: table.c[name] + new.excluded[name] for name in figures}
    for name, further in zip(span, (operator.lt, operator.gt), strict=False):
        old, other = table.c[name], new.excluded[name]
        changes[name] = case((further(other, old), other), else_=old)
    return new.on_conflict_do_update(index_elements=names, set_=changes)


def _add(sums: list[int], figures: Sequence[int], sign: int) -> None:
    for index, figure in enumerate(figures):
        sums[index] += sign * figure


_request_name: Final = operator.attrgetter(*SumKey.__slots__)
_step_name: Final = operator.attrgetter(*StepKey.__slots__)
_device_name: Final = operator.attrgetter(*DeviceKey.__slots__)
_REQUESTS: Final = TotalsUpsert(request_totals, SumKey.__slots__, REQUEST_FIGURES)
_STEPS: Final = TotalsUpsert(step_totals, StepKey.__slots__, STEP_FIGURES)
_DEVICES: Final = TotalsUpsert(device_totals, DeviceKey.__slots__, DEVICE_FIGURES)
_RUNTIMES: Final = TotalsUpsert(
    runtime_totals, ("runtime_id", "tenant"), RUNTIME_FIGURES, ("first_at_us", "last_at_us"), ("owner",)
)
