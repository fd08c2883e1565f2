"""The journal holds the ledger's entries in order. A replay gives the same chains, to the last digest."""

import errno
import hashlib
import os
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import OperationalError

from controlplane.app.control_plane_services import open_services
from controlplane.app.settings import load
from controlplane.backup.restore_program import replay
from controlplane.billing.billing_report import close_month
from controlplane.billing.price_book import default_price_book
from controlplane.db.database import Database, sqlite_engine
from controlplane.ledger.ledger_journal import (
    PIECE_BYTES,
    ClosedMonthEntry,
    JournalEntry,
    LedgerJournal,
    OlderDatabase,
    count_lost_after,
    decode_entry,
    encode_entry,
    entries_after,
    journal_extent,
)
from controlplane.ledger.usage_ledger import Ledger
from controlplane.ledger_check.ledger_verification import verify_ledger
from kelvin.contracts.accounting.billing_reports import BillLine, ClosingReport
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import LifetimeBatch, RequestBatch, RunningLifetimes
from kelvin.contracts.setting_parser import BadSetting
from kelvin.spool.segment_disk import SegmentDisk, segment_name, segments
from tests.controlplane.billing_fixture import memory_ledger_engine, report
from tests.controlplane.builders import World
from tests.controlplane.usage_records import END_US, MONTH, lifetime_record, request_record

LATER_US = END_US + 7_200_000_000


class FullDisk(SegmentDisk):
    """A disk that refuses writes while `full`, or after `takes` more writes."""

    full = False
    takes: int | None = None

    def write(self, fd: int, payload: bytes, offset: int) -> None:
        if self.takes is not None:
            self.full, self.takes = self.takes == 0, self.takes - 1
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, payload, offset)


@asynccontextmanager
async def over(path: Path, disk: SegmentDisk | None = None) -> AsyncIterator[tuple[Ledger, LedgerJournal]]:
    """Open a ledger with a journal in `path`/place."""
    with closing(World(path, path / "place", has_journal=True, disk=disk)) as world:
        assert world.journal is not None
        yield world.ledger, world.journal


async def enter(path: Path, *numbers: int) -> None:
    """Start, and append each request in a transaction of its own."""
    async with over(path) as (ledger, _):
        await ledger.write_due_marks()
        for number in numbers:
            await ledger.append_requests(RequestBatch(records=(request_record(number),)))


async def fill(ledger: Ledger) -> None:
    """Append requests of two tenants, a repeat, a conflict, a lifetime, a closed month, and a late record."""
    await ledger.append_requests(RequestBatch(records=(request_record(1), request_record(2, tenant="b"))))
    await ledger.append_requests(RequestBatch(records=(request_record(1), request_record(3))))
    await ledger.append_requests(RequestBatch(records=(request_record(3, completion_tokens=99),)))
    await ledger.append_lifetimes(LifetimeBatch(records=(lifetime_record(1, requests=2),)))
    await close(ledger)
    await ledger.append_requests(RequestBatch(records=(request_record(4),)))


async def close(ledger: Ledger) -> ClosingReport:
    return await ledger.write_closing(
        lambda connection: close_month(connection, default_price_book(), "acme", MONTH, live=None, now_us=LATER_US)
    )


def chains(database: Database) -> list[Any]:
    """Return every chain of both tenants, after verifying it."""
    with database.engine.connect() as connection:
        found = [verify_ledger(connection, tenant, None) for tenant in ("acme", "b")]
    assert all(each.sound for each in found)
    return [(each.tenant, chain.month, chain.links, chain.chain) for each in found for chain in each.months]


def again(place: Path, path: Path, after: int = 0) -> Database:
    """Return a new database that was made from the journal alone."""
    path.mkdir()
    database = Database(sqlite_engine(path / "kelvin.db"))
    replay(database.engine, (entry for _, entry in entries_after(place, after)))
    return database


async def test_replayed_journal_gives_the_same_ledger(tmp_path: Path) -> None:
    """All chains end with the same digests, also after repeats, conflicts, a closed month and an adjustment."""
    async with over(tmp_path / "a") as (ledger, _):
        await fill(ledger)
        wanted = chains(ledger.database)
    database = again(tmp_path / "a" / "place", tmp_path / "b")
    assert chains(database) == wanted
    replay(database.engine, (entry for _, entry in entries_after(tmp_path / "a" / "place", 0)))
    assert chains(database) == wanted, "a second replay changes nothing"
    database.close()


@pytest.mark.parametrize(
    "records",
    [
        (request_record(1), request_record(1, completion_tokens=99, sequence=50), request_record(2)),
        (
            request_record(1),
            request_record(2),
            request_record(1, origin=RecordOrigin.ORPHAN, source="rt-1", sequence=1),
        ),
        (request_record(1), request_record(2, sequence=1), request_record(3), request_record(2), request_record(2)),
    ],
    ids=["two records that conflict", "two records of one request", "a sequence used twice"],
)
@pytest.mark.parametrize("size", [1, 2, 5])
async def test_chains_do_not_depend_on_batches(tmp_path: Path, records: Sequence[RequestRecord], size: int) -> None:
    """A replay cuts batches differently and gives the same last digest."""
    async with over(tmp_path) as (ledger, _):
        for start in range(0, len(records), size):
            await ledger.append_requests(RequestBatch(records=tuple(records[start : start + size])))
        await ledger.append_requests(RequestBatch(records=(request_record(9),)))
    same_again(tmp_path)


async def test_chains_of_lives_do_not_depend_on_batches(tmp_path: Path) -> None:
    """One of the lifetimes contradicts another."""
    async with over(tmp_path) as (ledger, _):
        for lives in ((lifetime_record(1), lifetime_record(1, active_us=7, sequence=2)), (lifetime_record(3),)):
            await ledger.append_lifetimes(LifetimeBatch(records=lives))
    same_again(tmp_path)


async def test_missing_journal_entry_changes_the_chains(tmp_path: Path) -> None:
    """Negative control: without the last entry the chains differ."""
    async with over(tmp_path / "a") as (ledger, _):
        await fill(ledger)
        wanted = chains(ledger.database)
    place = tmp_path / "a" / "place"
    database = Database(sqlite_engine(tmp_path / "less.db"))
    replay(database.engine, [entry for _, entry in entries_after(place, 0)][:-1])
    assert chains(database) != wanted
    database.close()


async def test_record_is_not_entered_without_the_journal(tmp_path: Path) -> None:
    """A full disk loses nothing: the sender keeps the batch, and the ledger accepts it later."""
    disk = FullDisk()
    async with over(tmp_path, disk) as (ledger, journal):
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


async def test_month_stays_open_without_its_journal_entry(tmp_path: Path) -> None:
    """Neither the frozen bill nor its link is written."""
    disk = FullDisk()
    async with over(tmp_path, disk) as (ledger, _):
        await ledger.append_requests(RequestBatch(records=(request_record(1),)))
        disk.full = True
        with pytest.raises(Refused):
            await close(ledger)
        with ledger.database.engine.connect() as connection:
            assert not verify_ledger(connection, "acme", MONTH).months[0].closed


def commits_fail(database: Database, count: int = 1) -> None:
    """Make the next `count` transactions fail at COMMIT."""
    left = [count]

    def lose(_: Connection) -> None:
        if left[0]:
            left[0] -= 1
            raise OperationalError("COMMIT", None, sqlite3.OperationalError("database or disk is full"))

    event.listen(database.engine, "commit", lose)


def bill(database: Database) -> tuple[Any, ...]:
    """Return the billed content of the ledger."""
    with database.engine.connect() as connection:
        lives = connection.execute(text("SELECT runtime_id, active_us FROM ledger_lifetimes")).all()
        requests = connection.execute(text("SELECT request_id, stands FROM ledger_requests ORDER BY request_id")).all()
        closed = connection.execute(text("SELECT month, report FROM ledger_closings")).all()
        aside = connection.execute(text("SELECT COUNT(*) FROM ledger_conflicts")).scalar_one()
    return lives, requests, closed, aside


def same_again(path: Path) -> None:
    """Check that a replay of the journal gives the same bills and chains as the ledger beside it."""
    database, replayed = Database(sqlite_engine(path / "kelvin.db")), again(path / "place", path / "again")
    assert bill(replayed) == bill(database)
    assert chains(replayed) == chains(database)
    replayed.close()
    database.close()


@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_uncommitted_lifetime_is_not_replayed(tmp_path: Path, failures: int) -> None:
    """The record of a lost replica fails at COMMIT. The full lifetime record that comes later counts."""
    async with over(tmp_path) as (ledger, _):
        await ledger.append_requests(RequestBatch(records=(request_record(1),)))
        await ledger.record_running_replicas(
            RunningLifetimes(records=(lifetime_record(1, sequence=0, active_us=13, total_us=13),)), 1
        )
        commits_fail(ledger.database, failures)
        for _attempt in range((failures + 1) // 2):  # each failure is followed by an attempt to mark it
            with pytest.raises(OperationalError):
                await ledger.record_lost_replicas(2)
        await ledger.append_lifetimes(LifetimeBatch(records=(lifetime_record(1, active_us=50_022),)))
    same_again(tmp_path)


async def test_many_uncommitted_entries_are_not_replayed(tmp_path: Path) -> None:
    """The database's disk is full. Each attempt adds entries and drop marks, more than one transaction can write."""
    records = tuple(request_record(number) for number in range(10, 110))

    async def fail(ledger: Ledger) -> None:
        commits_fail(ledger.database, 100)
        for _attempt in range(3):
            with pytest.raises(OperationalError):
                await ledger.append_requests(RequestBatch(records=records))

    async with over(tmp_path) as (ledger, _):
        await ledger.append_requests(RequestBatch(records=(request_record(1),)))
        await ledger.record_running_replicas(
            RunningLifetimes(records=(lifetime_record(1, sequence=0, active_us=13, total_us=13),)), 1
        )
        await fail(ledger)
    async with over(tmp_path) as (ledger, _):
        await fail(ledger)
    async with over(tmp_path) as (ledger, _):
        commits_fail(ledger.database, 2)
        with pytest.raises(OperationalError):
            await ledger.record_lost_replicas(2)
        await ledger.append_lifetimes(LifetimeBatch(records=(lifetime_record(1, active_us=50_022),)))
    same_again(tmp_path)


async def test_repeated_closing_adds_no_journal_entry(tmp_path: Path) -> None:
    """A bill may be large, and a month may be closed any number of times."""
    async with over(tmp_path) as (ledger, journal):
        first = await close(ledger)
        end = journal.committed
        assert await close(ledger) == first
        assert journal.committed == end


async def test_uncommitted_closing_is_not_replayed(tmp_path: Path) -> None:
    """The month is closed later, with one more request."""
    async with over(tmp_path) as (ledger, _):
        await ledger.append_requests(RequestBatch(records=(request_record(1),)))
        commits_fail(ledger.database)
        with pytest.raises(OperationalError):
            await close(ledger)
        await ledger.append_requests(RequestBatch(records=(request_record(2),)))
        await close(ledger)
    same_again(tmp_path)


async def test_a_failed_commit_is_marked_at_once(tmp_path: Path) -> None:
    """The journal is right without a further write."""
    async with over(tmp_path) as (ledger, _):
        await ledger.append_requests(RequestBatch(records=(request_record(1),)))
        commits_fail(ledger.database)
        with pytest.raises(OperationalError):
            await ledger.append_requests(RequestBatch(records=(request_record(2),)))
    same_again(tmp_path)


async def test_start_marks_uncommitted_entries_as_dropped(tmp_path: Path) -> None:
    """The process was killed between the journal and COMMIT. Records that are sent again are stored and replayed."""
    async with over(tmp_path) as (ledger, journal):
        await ledger.append_requests(RequestBatch(records=(request_record(1),)))
        journal.append([request_record(2), request_record(3)])
    async with over(tmp_path) as (ledger, _):
        await ledger.write_due_marks()
        await ledger.write_due_marks()  # nothing is left to mark
        await ledger.append_requests(RequestBatch(records=(request_record(3),)))
    same_again(tmp_path)
    assert [sequence for sequence, _ in entries_after(tmp_path / "place", 0)] == [1, 5]
    assert count_lost_after(tmp_path / "place", 0) == 0


async def test_reused_journal_drops_no_committed_entry(tmp_path: Path) -> None:
    """The database's position may belong to another place's journal, and then says nothing about this one."""
    for place, number in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("a", 5)):
        with closing(World(tmp_path, tmp_path / place, has_journal=True)) as world:
            await world.ledger.write_due_marks()
            await world.enter(number)
    assert [sequence for sequence, _ in entries_after(tmp_path / "a", 0)] == [1, 2, 3, 5]


async def test_a_journal_without_marks_is_replayed_whole(tmp_path: Path) -> None:
    """An older program leaves no position in the database. All entries of its journal were committed."""
    async with over(tmp_path) as (ledger, _):
        await fill(ledger)
        with ledger.database.engine.begin() as connection:
            connection.execute(text("DELETE FROM ledger_journal"))
    (tmp_path / "place" / "journal" / "committed").unlink()
    await enter(tmp_path, 9)
    same_again(tmp_path)


async def test_older_database_beside_its_journal_is_refused(tmp_path: Path) -> None:
    """The database lacks committed transactions whose senders were answered. A restore adds them."""
    await enter(tmp_path, 1, 2, 3)
    copy = (tmp_path / "kelvin.db").read_bytes()
    await enter(tmp_path, 4, 5, 6)
    (tmp_path / "kelvin.db").write_bytes(copy)
    settings = load({"KELVIN_DATA": str(tmp_path / "data"), "KELVIN_BACKUP": str(tmp_path / "place")})
    (tmp_path / "data").mkdir()
    refusal = r"KELVIN_BACKUP=.*had entry 5 before.* Run `kelvin restore .* --replace`"
    with closing(Database(sqlite_engine(tmp_path / "kelvin.db"))) as database, pytest.raises(BadSetting, match=refusal):
        async with AsyncExitStack() as stack:
            await open_services(stack, settings, Mock(), Mock(), Mock(), Mock(), database, None)
    for numbers in ((), (7,)):
        with pytest.raises(OlderDatabase, match="ends at entry 3 of the journal, and had entry 5"):
            await enter(tmp_path, *numbers)
    assert [sequence for sequence, _ in entries_after(tmp_path / "place", 0)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("left", ["nothing", "an empty file", "what was there before the journal"])
async def test_database_that_lost_its_log_with_the_position_is_refused(tmp_path: Path, left: str) -> None:
    """The journal knows what was committed. A backup of a new database would be the newest one."""
    with closing(World(tmp_path)) as without:
        await without.enter(9)
    before = (tmp_path / "kelvin.db").read_bytes()
    if left != "what was there before the journal":
        (tmp_path / "kelvin.db").unlink()
    await enter(tmp_path, 1, 2, 3)
    (tmp_path / "kelvin.db").unlink()
    match left:
        case "an empty file":
            (tmp_path / "kelvin.db").touch()
        case "what was there before the journal":
            (tmp_path / "kelvin.db").write_bytes(before)
    for numbers in ((), (), (7,)):
        with pytest.raises(OlderDatabase, match="ends at entry 0 of the journal, and had entry 2"):
            await enter(tmp_path, *numbers)
    assert [sequence for sequence, _ in entries_after(tmp_path / "place", 0)] == [1, 2, 3]


@pytest.mark.parametrize(
    "note", [b"", bytes(12), b"\xff" * 12, b"\x05" * 7], ids=["empty", "zeros", "other bytes", "torn"]
)
async def test_damaged_committed_file_drops_no_entry(tmp_path: Path, note: bytes) -> None:
    """It is unknown which entries were committed, so all count. An older database is not refused then."""
    await enter(tmp_path, 1, 2, 3)
    copy = (tmp_path / "kelvin.db").read_bytes()
    await enter(tmp_path, 4, 5, 6)
    (tmp_path / "kelvin.db").write_bytes(copy)
    (tmp_path / "place" / "journal" / "committed").write_bytes(note)
    await enter(tmp_path, 7)
    assert [sequence for sequence, _ in entries_after(tmp_path / "place", 0)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("note", [None, b""], ids=["an older program's", "damaged"])
async def test_failed_first_start_drops_no_entry_later(tmp_path: Path, note: bytes | None) -> None:
    """A file written at that start would say that the database never went further."""
    await enter(tmp_path, 1, 2, 3)
    copy = (tmp_path / "kelvin.db").read_bytes()
    await enter(tmp_path, 4, 5, 6)
    (tmp_path / "kelvin.db").write_bytes(copy)
    path = tmp_path / "place" / "journal" / "committed"
    path.unlink()
    if note is not None:
        path.write_bytes(note)
    async with over(tmp_path) as (ledger, _):
        commits_fail(ledger.database, 1)
        with pytest.raises(OperationalError):
            await ledger.write_due_marks()
    await enter(tmp_path, 7)
    assert [sequence for sequence, _ in entries_after(tmp_path / "place", 0)] == [1, 2, 3, 4, 5, 6, 7]


async def test_a_read_only_place_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal of an older program has no committed file. Only writes are refused."""
    await enter(tmp_path, 1)
    (tmp_path / "place" / "journal" / "committed").unlink()
    real_open = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if "place" in Path(path).parts and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", read_only)
    await enter(tmp_path)
    with pytest.raises(Refused):
        await enter(tmp_path, 2)
    monkeypatch.undo()
    await enter(tmp_path, 2)
    assert [sequence for sequence, _ in entries_after(tmp_path / "place", 0)] == [1, 2]


def test_first_start_with_an_older_journal_drops_nothing(tmp_path: Path) -> None:
    """The journal does not say which entries were committed."""
    journal = LedgerJournal(tmp_path)
    journal.append([request_record(1), request_record(2)])
    journal.close()
    (tmp_path / "journal" / "committed").unlink()
    journal = LedgerJournal(tmp_path)
    journal.drop_after(1)
    assert [sequence for sequence, _ in entries_after(tmp_path, 0)] == [1, 2]
    journal.append([request_record(3)])
    journal.drop_after(2)
    assert [sequence for sequence, _ in entries_after(tmp_path, 0)] == [1, 2]
    journal.close()


def large_closing() -> ClosedMonthEntry:
    """Return a closed month whose bill names more models than one frame of the journal holds."""
    lines = tuple(
        BillLine(item="prompt_tokens", model=hashlib.sha256(b"%d" % number).hexdigest()[:63], device_class=None,
                 since="2026-01-01", quantity=number, unit="token", price_micros=1, per=1, amount_micros=number)
        for number in range(12_000)
    )  # fmt: skip
    return ClosedMonthEntry(prices="{}", report=msgspec.structs.replace(report(memory_ledger_engine()), lines=lines))


def test_a_bill_of_thousands_of_models_is_kept(tmp_path: Path) -> None:
    """The bill is written in pieces. If a piece is lost, the bill is lost, but later entries are still read."""
    journal = LedgerJournal(tmp_path, segment_bytes=PIECE_BYTES + 1024)  # one segment for each piece
    closing, records = large_closing(), [request_record(1), request_record(2)]
    journal.append([records[0], closing, records[1]])
    journal.close()
    assert [entry for _, entry in entries_after(tmp_path, 0)] == [records[0], closing, records[1]]
    assert count_lost_after(tmp_path, 0) == 0
    pieces = journal.committed - 2
    assert pieces > 2
    for first in segments(tmp_path / "journal")[1:-1]:
        path = tmp_path / "journal" / segment_name(first)
        whole = path.read_bytes()
        path.write_bytes(bytes(len(whole)))
        assert [entry for _, entry in entries_after(tmp_path, 0)] == records
        assert count_lost_after(tmp_path, 0) == 1
        path.write_bytes(whole)


def test_partly_written_closing_is_not_a_loss(tmp_path: Path) -> None:
    """The closing was refused, so a restore must not report a missing entry."""
    disk = FullDisk()
    journal = LedgerJournal(tmp_path, disk=disk, segment_bytes=PIECE_BYTES + 1024)  # one segment for each piece
    records = [request_record(1), request_record(2)]
    journal.append(records[:1])
    disk.takes = 2
    with pytest.raises(Refused):
        journal.append([large_closing()])
    disk.takes, disk.full = None, False
    assert journal.committed == 3
    journal.drop_after(1)
    journal.append(records[1:])
    journal.close()
    assert [entry for _, entry in entries_after(tmp_path, 0)] == records
    assert count_lost_after(tmp_path, 0) == 0


def test_sequences_go_on_after_a_restart_and_a_trim(tmp_path: Path) -> None:
    """A number is never used twice. A trim removes whole segments."""
    for number in range(1, 7):
        journal = LedgerJournal(tmp_path, segment_bytes=1024)
        journal.append([request_record(number)])
        assert journal.committed == number
        if number == 4:
            journal.trim(3)
        journal.close()
    assert journal_extent(tmp_path).trimmed == 3
    assert [sequence for sequence, _ in entries_after(tmp_path, 3)] == [4, 5, 6]
    assert len(segments(tmp_path / "journal")) == 3


def test_journal_has_one_writer(tmp_path: Path) -> None:
    """A second writer is refused while the first one has the journal open."""
    journal = LedgerJournal(tmp_path)
    with pytest.raises(BlockingIOError):
        LedgerJournal(tmp_path)
    journal.close()
    LedgerJournal(tmp_path).close()


def test_entries_behind_journal_damage_are_read(tmp_path: Path) -> None:
    """The gap in the numbers shows the loss."""
    for number in range(1, 4):
        journal = LedgerJournal(tmp_path, segment_bytes=2048)
        journal.append([request_record(number)])
        journal.close()
    path = tmp_path / "journal" / segment_name(2)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert [sequence for sequence, _ in entries_after(tmp_path, 0)] == [1, 3]


async def test_entries_behind_damage_outlast_a_restore(tmp_path: Path) -> None:
    """A restored database does not say how far the journal went. New entries must not reuse existing numbers."""
    async with over(tmp_path) as (ledger, _):
        await ledger.append_requests(RequestBatch(records=tuple(request_record(number) for number in range(1, 7))))
    path = tmp_path / "place" / "journal" / segment_name(1)
    path.write_bytes(path.read_bytes().replace(b"req-4", b"req-x"))
    (tmp_path / "kelvin.db").unlink()
    again(tmp_path / "place", tmp_path / "restored").close()
    (tmp_path / "restored" / "kelvin.db").rename(tmp_path / "kelvin.db")
    await enter(tmp_path, 7)
    kept = [entry.request_id for _, entry in entries_after(tmp_path / "place", 0) if isinstance(entry, RequestRecord)]
    assert kept == ["req-1", "req-2", "req-3", "req-5", "req-6", "req-7"]
    assert count_lost_after(tmp_path / "place", 0) == 1


def test_damage_in_the_last_segment_of_a_journal_is_missing(tmp_path: Path) -> None:
    """A restore reads the entries behind the damage, and reports one missing entry."""
    journal = LedgerJournal(tmp_path)
    journal.append([request_record(number) for number in range(1, 6)])
    journal.close()
    path = tmp_path / "journal" / segment_name(1)
    path.write_bytes(path.read_bytes().replace(b"req-3", b"req-x"))
    assert [sequence for sequence, _ in entries_after(tmp_path, 0)] == [1, 2, 4, 5]
    assert count_lost_after(tmp_path, 0) == 1


@pytest.mark.parametrize("lost", ["a frame", "the segment"])
async def test_no_number_is_given_twice_after_a_loss(tmp_path: Path, lost: str) -> None:
    """The disk lost the end of the journal. New entries get numbers behind every older backup."""
    async with over(tmp_path) as (ledger, _):
        for number in range(1, 6):
            await ledger.append_requests(RequestBatch(records=(request_record(number),)))
    path = tmp_path / "place" / "journal" / segment_name(1)
    if lost == "a frame":
        path.write_bytes(path.read_bytes().replace(b"req-3", b"req-x"))
    else:
        path.unlink()
    async with over(tmp_path) as (ledger, _):
        await ledger.write_due_marks()
        for number in range(6, 9):
            await ledger.append_requests(RequestBatch(records=(request_record(number),)))
    place = tmp_path / "place"
    known = 4 if lost == "a frame" else 0
    kept = [entry.request_id for _, entry in entries_after(place, 5) if isinstance(entry, RequestRecord)]
    assert kept == ["req-6", "req-7", "req-8"]
    assert count_lost_after(place, 5) == 0
    assert count_lost_after(place, 0) == 5 - known


def test_entries_keep_their_kind() -> None:
    """An entry is decoded as the kind that was encoded. An unknown kind is refused."""
    entry: JournalEntry
    for entry in (request_record(1), lifetime_record(1)):
        assert decode_entry(encode_entry(entry)) == entry
    with pytest.raises(ValueError, match="kind"):
        decode_entry(b"X{}")


@pytest.mark.parametrize("between", ["b", None], ids=["another place", "no place"])
async def test_unused_journal_reports_a_gap(tmp_path: Path, between: str | None) -> None:
    """Entries made without this journal are reported as at least one loss for backups from before, and as none for
    later ones. A restart with the same journal is no gap.
    """
    for place, number in (("a", 1), ("a", 2), (between, 3), (between, 4), ("a", 5), ("a", 6)):
        with closing(World(tmp_path, tmp_path / (place or "none"), has_journal=place is not None)) as world:
            await world.ledger.write_due_marks()
            await world.enter(number)
    assert [sequence for sequence, _ in entries_after(tmp_path / "a", 0)] == [1, 2, 4, 5]
    assert [count_lost_after(tmp_path / "a", after) for after in range(6)] == [1, 1, 1, 0, 0, 0]
    if between is not None:
        assert count_lost_after(tmp_path / between, 0) == 0


async def test_gap_is_reported_after_a_failed_transaction(tmp_path: Path) -> None:
    """The entries of that transaction are dropped. The gap before them is still reported."""
    async with over(tmp_path) as (ledger, _):
        await ledger.append_requests(RequestBatch(records=(request_record(1),)))
        await Ledger(ledger.database).write_due_marks()
        await ledger.append_requests(RequestBatch(records=(request_record(2),)))
    assert count_lost_after(tmp_path / "place", 1) == 1
    reached = journal_extent(tmp_path / "place").last
    async with over(tmp_path) as (ledger, _):
        await Ledger(ledger.database).write_due_marks()
        commits_fail(ledger.database)
        with pytest.raises(OperationalError):
            await ledger.append_requests(RequestBatch(records=(request_record(3),)))
    assert (count_lost_after(tmp_path / "place", reached) or 0) >= 1
    same_again(tmp_path)
