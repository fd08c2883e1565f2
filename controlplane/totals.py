"""The sums that bills are made of, kept in the transaction of the records: what a batch adds, and takes back.

What a record adds is `policy/booking`'s.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table, case, delete, insert, update

from contracts.usage import LifetimeRecord
from controlplane.ledger_schema import device_totals, request_totals, runtime_totals
from controlplane.policy.booking import Booked, DeviceKey, SumKey, device_sums, request_sums, runtime_uses

REQUEST_FIGURES: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
DEVICE_FIGURES: Final = ("lifetimes", "restore_us", "active_us", "idle_us")
USE_FIGURES: Final = ("requests", "answered", "device_us")


class Totals:
    """Of one transaction. As large as the batch has days, models, outcomes and runtimes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._requests: defaultdict[SumKey, list[int]] = defaultdict(lambda: [0] * len(REQUEST_FIGURES))
        self._devices: defaultdict[DeviceKey, list[int]] = defaultdict(lambda: [0] * len(DEVICE_FIGURES))
        self._uses: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(USE_FIGURES))
        self._spans: dict[tuple[str, str], tuple[int, int]] = {}

    def add_requests(self, before: Sequence[Booked], after: Sequence[Booked]) -> None:
        """All records of one request as they were and as they are; the new ones are last."""
        for sign, group in ((-1, before), (1, after)):
            for key, figures in request_sums(group).items():
                _add(self._requests[key], figures, sign)
            for runtime_id, use in runtime_uses(booked.record for booked in group).items():
                _add(self._uses[runtime_id, after[0].record.tenant], use, sign)
        for booked in after[len(before) :]:
            record = booked.record
            if record.runtime_id is not None:
                name, at_us = (record.runtime_id, record.tenant), record.ended_at_us
                first, last = self._spans.get(name, (at_us, at_us))
                self._spans[name] = min(first, at_us), max(last, at_us)

    def add_lifetime(self, record: LifetimeRecord, month: str) -> None:
        """A replica's life."""
        for key, figures in device_sums(record, month).items():
            _add(self._devices[key], figures, 1)

    def write(self) -> None:
        """Add all of it. A sum that comes to nothing has no row: order and repeats leave no trace."""
        for key, figures in self._requests.items():
            if any(figures):
                names = {field: getattr(key, field) for field in SumKey.__slots__}
                self._add(request_totals, names, dict(zip(REQUEST_FIGURES, figures, strict=True)))
        for device_key, figures in self._devices.items():
            names = {field: getattr(device_key, field) for field in DeviceKey.__slots__}
            self._add(device_totals, names, dict(zip(DEVICE_FIGURES, figures, strict=True)))
        for name, use in self._uses.items():
            self._add_use(name, dict(zip(USE_FIGURES, use, strict=True)))

    def _add(self, table: Table, names: Mapping[str, Any], figures: Mapping[str, int]) -> None:
        same = [table.c[name] == value for name, value in names.items()]
        added = {name: table.c[name] + figure for name, figure in figures.items()}
        if self._connection.execute(update(table).where(*same).values(added)).rowcount == 0:
            self._connection.execute(insert(table).values({**names, **figures}))
        elif min(figures.values()) < 0:
            self._connection.execute(delete(table).where(*same, *(table.c[name] == 0 for name in figures)))

    def _add_use(self, name: tuple[str, str], use: Mapping[str, int]) -> None:
        c = runtime_totals.c
        runtime_id, tenant = name
        first_us, last_us = self._spans.get(name, (None, None))
        if first_us is None or last_us is None:
            return  # nothing of it is new
        changed = update(runtime_totals).where(c.runtime_id == runtime_id, c.tenant == tenant)
        added = {
            **{figure: c[figure] + value for figure, value in use.items()},
            "first_at_us": case((c.first_at_us > first_us, first_us), else_=c.first_at_us),
            "last_at_us": case((c.last_at_us < last_us, last_us), else_=c.last_at_us),
        }
        if self._connection.execute(changed.values(added)).rowcount == 0:
            row = {"runtime_id": runtime_id, "tenant": tenant, **use, "first_at_us": first_us, "last_at_us": last_us}
            self._connection.execute(insert(runtime_totals).values(row))


def _add(sums: list[int], figures: Sequence[int], sign: int) -> None:
    for index, figure in enumerate(figures):
        sums[index] += sign * figure
