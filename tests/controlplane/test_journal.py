"""The journal has what the ledger has, in the same order: replayed, the same chains come out, to the last digest."""

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from contracts.billing import ClosingReport
from contracts.control import LifetimeBatch, RequestBatch
from contracts.errors import Refused, Unavailable
from controlplane.journal import Entry, LedgerJournal, entries_after, entry_of, extent_of, payload_of
from controlplane.ledger import Ledger
from controlplane.month_end import close_month
from controlplane.price_book import default_price_book
from controlplane.replay import replay
from controlplane.store import Database, sqlite_engine
from controlplane.verify import verify_ledger
from spool.disk import Disk, segment_name, segments
from tests.controlplane.usage_records import END_US, MONTH, lifetime_record, request_record

LATER_US = END_US + 7_200_000_000


class FullDisk(Disk):
    """Takes nothing while `full`."""

    full = False

    def write(self, fd: int, payload: bytes, offset: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, payload, offset)


def over(
    path: Path, scenario: Callable[[Ledger, LedgerJournal], Coroutine[Any, Any, None]], disk: Disk | None = None
) -> None:
    """Run over a ledger with a journal in `path`/place; both are closed afterwards."""
    path.mkdir(exist_ok=True)
    database, journal = Database(sqlite_engine(path / "kelvin.db")), LedgerJournal(path / "place", disk=disk)
    try:
        asyncio.run(scenario(Ledger(database, journal), journal))
    finally:
        journal.close()
        database.close()


async def fill(ledger: Ledger) -> None:
    """Requests of two tenants, a repeat, a contradiction, a life, a closed month, and a late arrival."""
    await ledger.append_requests(RequestBatch(records=(request_record(1), request_record(2, tenant="b"))))
    await ledger.append_requests(RequestBatch(records=(request_record(1), request_record(3))))
    await ledger.append_requests(RequestBatch(records=(request_record(3, completion_tokens=99),)))
    await ledger.append_lifetimes(LifetimeBatch(records=(lifetime_record(1, requests=2),)))
    await close(ledger)
    await ledger.append_requests(RequestBatch(records=(request_record(4),)))


async def close(ledger: Ledger) -> ClosingReport:
    return await ledger.close_month(
        lambda connection: close_month(connection, default_price_book(), "acme", MONTH, live=None, now_us=LATER_US)
    )


def chains(database: Database) -> list[Any]:
    """Every chain of both tenants, which must be sound."""
    with database.engine.connect() as connection:
        found = [verify_ledger(connection, tenant, None) for tenant in ("acme", "b")]
    assert all(each.sound for each in found)
    return [(each.tenant, chain.month, chain.links, chain.chain) for each in found for chain in each.months]


def again(place: Path, path: Path, after: int = 0) -> Database:
    """A new database of a journal alone."""
    path.mkdir()
    database = Database(sqlite_engine(path / "kelvin.db"))
    replay(database.engine, (entry for _, entry in entries_after(place, after)))
    return database


def test_a_journal_makes_the_same_ledger(tmp_path: Path) -> None:
    """Chains end with the same digests: repeats, conflicts, a closed month and its adjustment included."""
    wanted: list[Any] = []

    async def scenario(ledger: Ledger, _: LedgerJournal) -> None:
        await fill(ledger)
        wanted.extend(chains(ledger.database))

    over(tmp_path / "a", scenario)
    database = again(tmp_path / "a" / "place", tmp_path / "b")
    assert chains(database) == wanted
    replay(database.engine, (entry for _, entry in entries_after(tmp_path / "a" / "place", 0)))
    assert chains(database) == wanted, "twice is once"
    database.close()


def test_an_entry_less_is_another_ledger(tmp_path: Path) -> None:
    """The control: without the last entry the chains differ."""
    wanted: list[Any] = []

    async def scenario(ledger: Ledger, _: LedgerJournal) -> None:
        await fill(ledger)
        wanted.extend(chains(ledger.database))

    over(tmp_path / "a", scenario)
    place = tmp_path / "a" / "place"
    database = Database(sqlite_engine(tmp_path / "less.db"))
    replay(database.engine, [entry for _, entry in entries_after(place, 0)][:-1])
    assert chains(database) != wanted
    database.close()


def test_what_the_journal_refuses_is_not_entered(tmp_path: Path) -> None:
    """And its sender keeps it: a full place of backups loses nothing, and the same batch is taken later."""
    disk = FullDisk()

    async def scenario(ledger: Ledger, journal: LedgerJournal) -> None:
        batch = RequestBatch(records=(request_record(1),))
        disk.full = True
        with pytest.raises(Refused) as refused:
            await ledger.append_requests(batch)
        assert refused.value.failure == Unavailable("the place of backups")
        assert chains(ledger.database) == []
        disk.full = False
        await ledger.append_requests(batch)
        assert journal.committed == 1
        assert len(chains(ledger.database)) == 1

    over(tmp_path, scenario, disk)


def test_a_closing_that_is_not_in_the_journal_did_not_happen(tmp_path: Path) -> None:
    """Neither the frozen bill nor its link."""
    disk = FullDisk()

    async def scenario(ledger: Ledger, _: LedgerJournal) -> None:
        await ledger.append_requests(RequestBatch(records=(request_record(1),)))
        disk.full = True
        with pytest.raises(Refused):
            await close(ledger)
        with ledger.database.engine.connect() as connection:
            assert not verify_ledger(connection, "acme", MONTH).months[0].closed

    over(tmp_path, scenario, disk)


def test_sequences_go_on_after_a_restart_and_a_trim(tmp_path: Path) -> None:
    """Numbers are never used twice; what a backup holds is let go of by whole segments."""
    for number in range(1, 7):
        journal = LedgerJournal(tmp_path, segment_bytes=1024)
        journal.append([request_record(number)])
        assert journal.committed == number
        if number == 4:
            journal.trim(3)
        journal.close()
    assert extent_of(tmp_path).trimmed == 3
    assert [sequence for sequence, _ in entries_after(tmp_path, 3)] == [4, 5, 6]
    assert len(segments(tmp_path / "journal")) == 3


def test_a_place_has_one_writer(tmp_path: Path) -> None:
    """Another installation's control plane is refused while the first lives."""
    journal = LedgerJournal(tmp_path)
    with pytest.raises(BlockingIOError):
        LedgerJournal(tmp_path)
    journal.close()
    LedgerJournal(tmp_path).close()


def test_a_damaged_journal_is_read_around(tmp_path: Path) -> None:
    """What lies behind a damaged segment is still entered; the jump says what is lost."""
    for number in range(1, 4):
        journal = LedgerJournal(tmp_path, segment_bytes=2048)
        journal.append([request_record(number)])
        journal.close()
    path = tmp_path / "journal" / segment_name(2)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert [sequence for sequence, _ in entries_after(tmp_path, 0)] == [1, 3]


def test_entries_keep_their_kind() -> None:
    """There and back; an unknown kind is refused."""
    entry: Entry
    for entry in (request_record(1), lifetime_record(1)):
        assert entry_of(payload_of(entry)) == entry
    with pytest.raises(ValueError, match="kind"):
        entry_of(b"X{}")
