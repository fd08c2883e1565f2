"""Recompute a tenant's totals from its rows, and compare them with the stored ones.

Rows may come in any order. Memory grows with a month's days, models and outcomes, and with the tenant's replicas.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table, select

from controlplane.db.database import check_row_types, stream_rows
from controlplane.db.ledger_schema import device_totals, request_records, request_totals, runtime_totals, step_totals
from controlplane.ledger.policy.booking import decode_row_key, device_sums
from controlplane.ledger.policy.discrepancies import Discrepancy, DiscrepancyKind, TotalKind, TotalMismatch
from controlplane.ledger.policy.month import DAY_US
from controlplane.ledger.usage_totals import DEVICE_FIGURES, REQUEST_FIGURES, RUNTIME_FIGURES, STEP_FIGURES
from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin
from kelvin.contracts.serving.degradation_steps import step_of_record

# The columns of a request that are counted, in the order of `add_request`.
COUNTED_COLUMNS: Final = (
    "request_id", "origin", "runtime_id", "model", "outcome", "ended_at_us", "prompt_tokens", "cached_tokens",
    "completion_tokens", "device_us", "stands", "billable", "replaces", "degraded",
)  # fmt: skip
_ROWS: Final = 2_000

DailyRequestKey = tuple[int, str, str, bool]  # day, model, outcome, billable
DailyStepKey = tuple[int, str]  # day, step
DailyDeviceKey = tuple[int, str, str]  # day, model, device class
RuntimeUsageFigures = list[int]  # RUNTIME_FIGURES, earliest and latest end

# The totals that are stored by day: kind, table, key columns, figures.
_STORED_TOTALS: Final[Sequence[tuple[TotalKind, Table, Sequence[str], Sequence[str]]]] = (
    (TotalKind.REQUESTS, request_totals, ("day", "model", "outcome", "billable"), REQUEST_FIGURES),
    (TotalKind.STEPS, step_totals, ("day", "step"), STEP_FIGURES),
    (TotalKind.DEVICE_TIME, device_totals, ("day", "model", "device_class"), DEVICE_FIGURES),
)


class RuntimeTotals:
    """Recomputed totals of each replica's requests in all months."""

    def __init__(self, connection: Connection, tenant: str) -> None:
        self._connection = connection
        self._tenant = tenant
        self._figures_by_runtime: dict[str, RuntimeUsageFigures] = {}

    def add(self, request_id: str, origin: str, runtime_id: str, ended_at_us: int, tokens: int, device_us: int) -> None:
        """Add a record that names the replica. An orphan's record and its activator's record are one request."""
        cost = int(device_us > 0 or tokens > 0)
        count = 1
        if origin == RecordOrigin.ORPHAN and (other := self._activator_figures(request_id, runtime_id)) is not None:
            known_tokens, known_us = other
            known = int(known_us > 0 or known_tokens > 0)
            count, cost, device_us = 0, max(cost - known, 0), max(device_us - known_us, 0)
        use = self._figures_by_runtime.get(runtime_id)
        if use is None:
            self._figures_by_runtime[runtime_id] = [count, cost, device_us, ended_at_us, ended_at_us]
            return
        use[0] += count
        use[1] += cost
        use[2] += device_us
        use[3] = min(use[3], ended_at_us)
        use[4] = max(use[4], ended_at_us)

    def findings(self) -> Iterator[Discrepancy]:
        """Yield stored totals of replicas that differ. Each replica is forgotten once it is compared."""
        c = runtime_totals.c
        figures = [c[name] for name in RUNTIME_FIGURES]
        stored = select(c.runtime_id, *figures, c.first_at_us, c.last_at_us).where(c.tenant == self._tenant)
        for runtime_id, *use in check_row_types(
            stored, stream_rows(self._connection, stored.order_by(c.runtime_id), _ROWS)
        ):
            if (recomputed := self._figures_by_runtime.pop(runtime_id, None)) != use:
                yield _runtime_mismatch(runtime_id, use, recomputed)
        for runtime_id in sorted(self._figures_by_runtime):
            yield _runtime_mismatch(runtime_id, None, self._figures_by_runtime.pop(runtime_id))

    def _activator_figures(self, request_id: str, runtime_id: str) -> tuple[int, int] | None:
        """Return tokens and device us of the activator's record of the same request, if it names the same replica."""
        c = request_records.c
        query = select(c.completion_tokens, c.device_us).where(
            c.tenant == self._tenant, c.request_id == request_id, c.origin == RecordOrigin.ACTIVATOR.value,
            c.runtime_id == runtime_id,
        )  # fmt: skip
        found = self._connection.execute(query).first()
        return None if found is None else (found.completion_tokens, found.device_us)


class RecomputedTotals:
    """Recomputed totals of one tenant's month. `runtimes` collects over several months."""

    def __init__(self, connection: Connection, tenant: str, month: str, runtimes: RuntimeTotals | None = None) -> None:
        self._connection = connection
        self._tenant = tenant
        self._month = month
        self._runtimes = runtimes
        self.requests: defaultdict[DailyRequestKey, list[int]] = defaultdict(lambda: [0] * len(REQUEST_FIGURES))
        self.steps: defaultdict[DailyStepKey, list[int]] = defaultdict(lambda: [0] * len(STEP_FIGURES))
        self.devices: defaultdict[DailyDeviceKey, list[int]] = defaultdict(lambda: [0] * len(DEVICE_FIGURES))

    def add_request(
        self,
        request_id: str,
        origin: str,
        runtime_id: str | None,
        model: str,
        outcome: str,
        ended_at_us: int,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        device_us: int,
        stands: bool,
        billable: bool,
        replaces: str | None,
        degraded: str | None,
    ) -> None:
        """Add a row of requests: the COUNTED_COLUMNS."""
        if stands:
            sums = self.requests[ended_at_us // DAY_US, model, outcome, billable]
            sums[0] += 1
            sums[1] += prompt_tokens
            sums[2] += cached_tokens
            sums[3] += completion_tokens
            self._add_step(ended_at_us, degraded, 1)
            if replaces is not None:
                self._subtract_replaced(request_id, replaces)
        if self._runtimes is not None and runtime_id is not None:
            self._runtimes.add(request_id, origin, runtime_id, ended_at_us, completion_tokens, device_us)

    def add_lifetime(self, record: LifetimeRecord) -> None:
        """Add a row of lifetimes."""
        for key, figures in device_sums(record, self._month).items():
            sums = self.devices[key.day, key.model, key.device_class]
            sums[:] = [old + new for old, new in zip(sums, figures, strict=True)]

    def rows(self) -> list[list[tuple[Any, ...]]]:
        """Return the totals as rows of their tables: requests, steps, device time."""
        return [
            [(*key, *figures) for key, figures in sums.items()] for sums in (self.requests, self.steps, self.devices)
        ]

    def findings(self) -> Iterator[Discrepancy]:
        """Yield stored totals that differ from the recomputed ones."""
        recomputed: dict[TotalKind, Mapping[Any, list[int]]] = {
            TotalKind.REQUESTS: self.requests,
            TotalKind.STEPS: self.steps,
            TotalKind.DEVICE_TIME: self.devices,
        }
        for total_kind, table, names, figures in _STORED_TOTALS:
            for total in self._mismatches(total_kind, table, names, figures, recomputed[total_kind]):
                subject = f"total of day {', '.join(str(part) for part in total.key)}"
                detail = f"{list(figures)} are {total.stored}; the rows make {total.recomputed}"
                yield Discrepancy(DiscrepancyKind.TOTAL_WRONG, subject, detail, total=total)

    def _add_step(self, ended_at_us: int, degraded: str | None, sign: int) -> None:
        if degraded is not None:
            self.steps[ended_at_us // DAY_US, step_of_record(degraded)][0] += sign

    def _subtract_replaced(self, request_id: str, replaces: str) -> None:
        """Subtract the charge of a closed month's record that is taken back."""
        c = request_records.c
        origin, orphan_of = decode_row_key(replaces)
        query = select(
            c.ended_at_us, c.degraded, c.model, c.outcome, c.billable, c.prompt_tokens, c.cached_tokens,
            c.completion_tokens,
        ).where(
            c.tenant == self._tenant, c.request_id == request_id, c.origin == origin, c.orphan_of == orphan_of
        )  # fmt: skip
        for ended_at_us, degraded, model, outcome, billable, *tokens in self._connection.execute(query):
            self._add_step(ended_at_us, degraded, -1)
            sums = self.requests[ended_at_us // DAY_US, model, outcome, billable]
            sums[:] = [old - new for old, new in zip(sums, (1, *tokens), strict=True)]

    def _mismatches(
        self,
        total_kind: TotalKind,
        table: Table,
        names: Sequence[str],
        figures: Sequence[str],
        sums: Mapping[Any, list[int]],
    ) -> Iterator[TotalMismatch]:
        query = select(table).where(table.c.tenant == self._tenant, table.c.month == self._month)
        stored = {
            tuple(row._mapping[name] for name in names): [row._mapping[name] for name in figures]
            for row in check_row_types(query, self._connection.execute(query))
        }
        recomputed = {key: sum_ for key, sum_ in sums.items() if any(sum_)}
        for key in sorted(stored.keys() | recomputed.keys()):
            if stored.get(key) != recomputed.get(key):
                yield TotalMismatch(total_kind, key, stored.get(key), recomputed.get(key))


def _runtime_mismatch(
    runtime_id: str, stored: RuntimeUsageFigures | None, recomputed: RuntimeUsageFigures | None
) -> Discrepancy:
    detail = "the totals of this replica's requests are not what the rows make"
    total = TotalMismatch(TotalKind.REPLICA, (runtime_id,), stored, recomputed)
    return Discrepancy(DiscrepancyKind.TOTAL_WRONG, f"replica {runtime_id}", detail, total=total)
