"""Enter again what was entered once: a journal's entries, or the records of a backup's spools, in their order.

What is there already changes nothing, so that a journal may reach back further than the database that it is put on.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from sqlalchemy import Connection, Engine

from contracts.usage import LifetimeRecord, RequestRecord
from controlplane.closings import freeze, frozen_report, prices_of
from controlplane.journal import Closing, Entry
from controlplane.ledger import append_lifetimes, append_requests, keep_aside
from controlplane.usage_batches import Unreadable

BATCH: Final = 500


def replay(engine: Engine, entries: Iterable[Entry]) -> int:
    """How many there were. Durable on return, batch by batch; stop at any point and begin again."""
    count = 0
    for batch in _batches(entries):
        with engine.begin() as connection:
            _enter(connection, batch)
        count += len(batch)
    return count


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Of one kind each."""
    for _, alike in groupby(entries, type):
        batch: list[Entry] = []
        for entry in alike:
            batch.append(entry)
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch


def _enter(connection: Connection, batch: list[Entry]) -> None:
    append_requests(connection, [entry for entry in batch if isinstance(entry, RequestRecord)])
    append_lifetimes(connection, [entry for entry in batch if isinstance(entry, LifetimeRecord)])
    if unreadable := [entry for entry in batch if isinstance(entry, Unreadable)]:
        keep_aside(connection, unreadable)
    for entry in batch:
        if isinstance(entry, Closing):
            report = entry.report
            if frozen_report(connection, report.tenant, report.month) is None:
                freeze(connection, prices_of(entry.prices), report)
