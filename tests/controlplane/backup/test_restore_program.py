"""A backup of a running control plane is restored whole or not at all. It is verified first, then moved into place."""

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from sqlalchemy import text
from starlette.requests import Request

from controlplane.api.internal_api import backup_routes
from controlplane.backup import restore_target
from controlplane.backup.archive import unpack
from controlplane.backup.backup_directory import backup_name, list_backups, write_backup
from controlplane.backup.backups import FILES
from controlplane.backup.restore_program import restore
from controlplane.backup.restore_target import CannotRestore
from controlplane.billing.billing_report import close_month
from controlplane.billing.price_book import default_price_book
from controlplane.db.database import Database
from controlplane.ledger.ledger_journal import count_lost_after
from controlplane.ledger.policy.month import month_of
from kelvin.contracts.accounting.backup_reports import BackupIndex
from kelvin.contracts.errors import CapacityExceeded, Refused
from kelvin.contracts.wire import encode
from kelvin.spool.frame import MAX_RECORD_BYTES
from kelvin.spool.segment_disk import segment_name, segments
from kelvin.spool.segment_writer import SegmentWriter
from tests.controlplane.builders import NOW_S, back_up_and_enter_one, ids, installed, restore_backup
from tests.controlplane.usage_records import END_US, HOUR_US, MONTH, lifetime_record, request_record

ROOT = Path(__file__).parents[3]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A backup with two requests."""

    async def main() -> None:
        async with installed(tmp_path) as world:
            await world.enter(1, 2)
            await world.back_up(tmp_path / "made.backup")

    asyncio.run(main())
    return tmp_path / "made.backup"


async def test_backup_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for the copy of the database. The answer is an error that names the disk, not a cut archive."""

    def copy(_: Database, path: Path) -> None:
        raise OSError(errno.ENOSPC, f"{path}: no room")

    async with installed(tmp_path) as world:
        [route] = backup_routes(world.backups)
        monkeypatch.setattr(Database, "copy", copy)
        with pytest.raises(Refused) as refused:
            await route.endpoint(Request({"type": "http"}))
        assert refused.value.failure == CapacityExceeded("bytes on the disk of DATA, for a copy of kelvin.db", 1, 0)
        assert not list(world.data.glob(".backup-*"))


def test_restore_brings_back_all_files(made: Path, tmp_path: Path) -> None:
    """Database, keys, CA and identity are equal. Only the owner can read secrets. The report names the versions."""
    report = restore_backup(made, tmp_path / "new")
    assert report.sound
    assert (report.missing, report.aside, report.keys) == (0, None, 2)
    assert [version.model for version in report.versions] == ["m"]
    assert set(report.placed) == {*FILES, "kelvin.db"}
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-1", "req-2"]
    for name in FILES:
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "data" / name).read_bytes()
        assert (tmp_path / "new" / name).stat().st_mode & 0o077 == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "kelvin.db",
        "tls",
        "attest.key",
        "once.key",
        *FILES[:3],
        "installation",
    }


async def test_a_file_of_a_place_says_how_many_entries_come_after_it(tmp_path: Path) -> None:
    """Only a restore from the directory includes the journal. A check of the file does not count missing entries."""
    async with installed(tmp_path) as world:
        await world.enter(1, 2)
        made = await world.backup_loop().make_backup()
        assert made is not None
        assert restore_backup(made, tmp_path / "at once").missing == 0
        await world.enter(3, 4, 5)
    assert restore(made, None, replace=False, accept_unsound=False).missing == 0
    report = restore_backup(made, tmp_path / "file")
    assert (report.replayed, report.missing) == (0, 3)
    report = restore_backup(tmp_path / "place", tmp_path / "file", replace=True)
    assert (report.replayed, report.missing) == (3, 0)


async def test_a_file_is_restored_beside_a_journal_of_a_newer_program(tmp_path: Path) -> None:
    """Only a restore from the directory has to read the journal's entries. A restore of the file counts them."""
    file = await back_up_and_enter_one(tmp_path)
    journal = SegmentWriter(tmp_path / "place" / "journal")
    journal.commit([lambda _: b"Xof a newer program"])
    journal.close()
    with pytest.raises(CannotRestore, match="restore with the version of Kelvin that wrote it"):
        restore_backup(tmp_path / "place", tmp_path / "whole")
    report = restore_backup(file, tmp_path / "file")
    assert (report.replayed, report.missing) == (0, 2)


async def test_older_database_is_not_backed_up(tmp_path: Path) -> None:
    """Its start was not refused, because the database was locked. A backup would claim to hold the whole journal."""
    async with installed(tmp_path) as world:
        await world.enter(1)
        world.close()
        copy = (world.data / "kelvin.db").read_bytes()
        world.open()
        for number in (2, 3, 4):
            await world.enter(number)
        world.close()
        (world.data / "kelvin.db").write_bytes(copy)
        world.open()
        with pytest.raises(Refused, match="ends at entry 1 of the journal, and had entry 3 before"):
            await world.backup_loop().make_backup()


async def test_new_database_beside_a_used_journal_is_not_backed_up(tmp_path: Path) -> None:
    """The database lacks everything: its write-ahead log was lost in the first minute."""
    async with installed(tmp_path) as world:
        for number in (1, 2, 3):
            await world.enter(number)
        world.close()
        (world.data / "kelvin.db").unlink()
        world.open()
        with pytest.raises(Refused, match="ends at entry 0 of the journal, and had entry 2 before"):
            await world.backup_loop().make_backup()


@pytest.mark.parametrize("has_journal", [True, False], ids=["of now", "of an older program"])
async def test_restored_database_goes_on_with_its_journal(tmp_path: Path, *, has_journal: bool) -> None:
    """It is not refused as a new database, though it has no position. An older program's backup does not know that a
    journal was in use. No gap is reported, because nothing was stored without the journal.
    """
    async with installed(tmp_path, has_journal=has_journal) as world:
        if has_journal:
            await world.ledger.write_due_marks()
            await world.enter(1, 2)
        file = await world.back_up(tmp_path / "b.backup")
        world.close()
        world.has_journal = True
        world.open()
        for number in (3, 4, 5):
            await world.enter(number)
        world.close()
        restore_backup(file, world.data, replace=True)
        world.open()
        await world.ledger.write_due_marks()
        await world.enter(6)
        assert count_lost_after(world.place, 0) == 0
    assert ids(tmp_path / "data" / "kelvin.db")[-1] == "req-6"


async def test_database_restored_from_another_place_leaves_a_gap(tmp_path: Path) -> None:
    """That journal lacks the entries of the backup's journal."""
    async with installed(tmp_path) as world:
        await world.enter(1)
        world.close()
        first, world.place = world.place, tmp_path / "second"
        world.open()
        await world.ledger.write_due_marks()
        await world.enter(2)
        file = await world.back_up(tmp_path / "b.backup")
        world.close()
        restore_backup(file, world.data, replace=True)
        world.place = first
        world.open()
        await world.ledger.write_due_marks()
        assert (count_lost_after(first, 0), count_lost_after(tmp_path / "second", 0)) == (1, 0)


@pytest.mark.deep
async def test_backup_has_all_records_durable_at_its_start(tmp_path: Path) -> None:
    """A hundred records are stored beside five backups. Each backup has all records that were durable at its start."""
    async with installed(tmp_path) as world:
        entered = 0

        async def enter() -> None:
            nonlocal entered
            for number in range(1, 101):
                await world.enter(number)
                entered = number

        entering = asyncio.create_task(enter())
        for turn in range(5):
            least = entered
            await world.back_up(tmp_path / f"{turn}.backup")
            report = await asyncio.to_thread(restore_backup, tmp_path / f"{turn}.backup", tmp_path / f"new{turn}")
            assert report.sound
            found = ids(tmp_path / f"new{turn}" / "kelvin.db")
            assert len(found) >= least
            assert found == [f"req-{number}" for number in range(1, len(found) + 1)]
        await entering


async def test_backup_contains_spooled_records(tmp_path: Path) -> None:
    """Requests and lifetimes of all sources are stored by the restore."""
    async with installed(tmp_path) as world:
        await world.enter(1)
        for source, record in (("activator-1", request_record(2)), ("supervisor-1", lifetime_record(1))):
            directory = world.data / "spool" / source
            directory.mkdir(parents=True)
            journal = SegmentWriter(directory)
            journal.commit([lambda _, record=record: encode(record)])  # type: ignore[misc]
            journal.close()
        await world.back_up(tmp_path / "b.backup")
    report = restore_backup(tmp_path / "b.backup", tmp_path / "new")
    assert report.unshipped == 2
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-1", "req-2"]


async def test_unreadable_spooled_record_does_not_stop_a_backup(tmp_path: Path) -> None:
    """A newer program wrote it before a downgrade. It is in the backup, and a restore counts it."""
    async with installed(tmp_path) as world:
        directory = world.data / "spool" / "activator-1"
        directory.mkdir(parents=True)
        journal = SegmentWriter(directory)
        journal.commit([lambda _: b'{"newer":1}', lambda _: encode(request_record(2))])
        journal.close()
        assert await world.backup_loop().make_backup() is not None
    report = restore_backup(tmp_path / "place", tmp_path / "new")
    assert (report.unshipped, report.unreadable) == (1, 1)
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-2"]


async def test_large_spooled_record_is_in_the_backup(tmp_path: Path) -> None:
    """It is as large as a spool allows. It is set aside in the month of the backup."""
    raw = b'{"request_id":"large","tenant":"acme","more":"'.ljust(MAX_RECORD_BYTES, b"x")
    async with installed(tmp_path) as world:
        directory = world.data / "spool" / "activator-1"
        directory.mkdir(parents=True)
        journal = SegmentWriter(directory)
        journal.commit([lambda _: raw, lambda _: encode(request_record(2))])
        journal.close()
        assert await world.backup_loop().make_backup() is not None
    report = restore_backup(tmp_path / "place", tmp_path / "new")
    assert (report.unshipped, report.unreadable) == (1, 1)
    with closing(sqlite3.connect(tmp_path / "new" / "kelvin.db")) as database:
        aside = database.execute("SELECT month, LENGTH(record) FROM ledger_conflicts").fetchall()
    assert aside == [(month_of(report.made_at_us), MAX_RECORD_BYTES)]


async def test_record_spooled_before_a_closing_is_restored(tmp_path: Path) -> None:
    """The record was in a spool at the backup, and was stored after its month was closed. The journal keeps that order,
    so the restored record adjusts the next month again.
    """
    book, closing_us = default_price_book(), END_US + 2 * HOUR_US
    async with installed(tmp_path) as world:
        directory = world.data / "spool" / "activator-1"
        directory.mkdir(parents=True)
        journal = SegmentWriter(directory)
        journal.commit([lambda _: encode(request_record(1))])
        journal.close()
        assert await world.backup_loop().make_backup() is not None
        await world.ledger.write_closing(
            lambda connection: close_month(connection, book, "acme", MONTH, live=None, now_us=closing_us)
        )
        await world.enter(1)
    report = restore_backup(tmp_path / "place", tmp_path / "new")
    assert (report.sound, report.replayed, report.unshipped) == (True, 2, 1)
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-1"]


async def test_the_journal_brings_back_what_came_after(tmp_path: Path) -> None:
    """A restore from the directory has the newest backup and every later record. A file alone has only its own."""
    async with installed(tmp_path) as world:
        await world.enter(1, 2)
        assert await world.backup_loop().make_backup() is not None
        await world.enter(3)
        await world.enter(4)
    report = restore_backup(tmp_path / "place", tmp_path / "new")
    assert (report.replayed, report.missing) == (2, 0)
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-1", "req-2", "req-3", "req-4"]
    ((_, path),) = list_backups(tmp_path / "place")
    assert restore_backup(path, tmp_path / "less").replayed == 0
    assert ids(tmp_path / "less" / "kelvin.db") == ["req-1", "req-2"]


def test_mount_point_counts_as_empty_data_directory(made: Path, tmp_path: Path) -> None:
    """A file system has `lost+found` at its root. A directory with any other entry is refused."""
    (tmp_path / "new" / "lost+found").mkdir(parents=True)
    restore_backup(made, tmp_path / "new")
    (tmp_path / "other" / "photos").mkdir(parents=True)
    with pytest.raises(restore_target.NotEmpty, match="photos"):
        restore_backup(made, tmp_path / "other")
    with pytest.raises(restore_target.NotEmpty, match="photos"):
        restore_backup(tmp_path / "missing.backup", tmp_path / "other")  # before the backup is read, which takes long
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["photos"]


async def test_missing_journal_entries_are_counted(tmp_path: Path) -> None:
    """Negative control of RPO 0: a lost entry or a missing journal is reported, and the rest is restored."""
    async with installed(tmp_path) as world:
        await world.enter(1)
        assert await world.backup_loop().make_backup() is not None
        for number in (2, 3):
            world.close()
            world.open()
            await world.enter(number)
    journal = tmp_path / "place" / "journal"
    (journal / segment_name(2)).write_bytes(b"")
    assert segments(journal)[-1] == 3
    report = restore_backup(tmp_path / "place", tmp_path / "new")
    assert (report.replayed, report.missing) == (1, 1)
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-1", "req-3"]
    shutil.rmtree(journal)
    assert restore_backup(tmp_path / "place", tmp_path / "newer").missing is None


async def test_damaged_backup_falls_back_to_the_previous(tmp_path: Path) -> None:
    """The journal covers the older backup, so nothing is lost. The report names the damaged one."""
    async with installed(tmp_path) as world:
        loop = world.backup_loop()
        for number in (1, 2):
            await world.enter(number)
            moment = await world.backups.begin()
            write_backup(world.place / backup_name(NOW_S + number), world.backups.pieces(moment, world.place))
        await world.enter(3)
        assert loop.age_s() >= 0
    newest = list_backups(tmp_path / "place")[-1][1]
    newest.write_bytes(newest.read_bytes()[:-2000])
    report = restore_backup(tmp_path / "place", tmp_path / "new")
    assert newest.name in report.passed_over[0]
    assert (report.replayed, report.missing) == (2, 0)
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-1", "req-2", "req-3"]


async def test_newest_backup_that_finds_no_room_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older backup may fit, but lacks newer data. Control: a backup that cannot be read is skipped."""

    def fails(archive: BinaryIO, into: Mapping[str, Path]) -> BackupIndex:
        if errors:
            raise errors.pop()
        return unpack(archive, into)

    async with installed(tmp_path) as world:
        for number in (1, 2):
            await world.enter(number)
            await world.backup_loop().make_backup()
    errors = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
    monkeypatch.setattr("controlplane.backup.restore_program.unpack", fails)
    with pytest.raises(OSError, match="No space left on device"):
        restore_backup(tmp_path / "place", tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    errors.append(OSError(errno.EIO, os.strerror(errno.EIO)))
    assert len(restore_backup(tmp_path / "place", tmp_path / "new").passed_over) == 1


@pytest.mark.parametrize("at", ["kelvin.db", "admin.key", "index.json"])
def test_a_tampered_backup_puts_nothing_in_place(made: Path, tmp_path: Path, at: str) -> None:
    """One byte of a member's content is changed."""
    raw = bytearray(made.read_bytes())
    where = raw.index(at.encode())
    raw[where + 512 + 20] ^= 1
    made.write_bytes(raw)
    with pytest.raises(CannotRestore):
        restore_backup(made, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


async def test_a_ledger_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    """The ledger was changed before the backup: digests match, the chain does not. `accept_unsound` restores it."""
    async with installed(tmp_path) as world:
        await world.enter(1, 2)
        with closing(sqlite3.connect(world.data / "kelvin.db")) as connection:
            connection.execute("UPDATE ledger_requests SET completion_tokens = 1 WHERE request_id = 'req-1'")
            connection.commit()
        await world.back_up(tmp_path / "b.backup")
    with pytest.raises(CannotRestore, match="is not sound: request req-1"):
        restore_backup(tmp_path / "b.backup", tmp_path / "new")
    assert not restore_backup(tmp_path / "b.backup", tmp_path / "new", accept_unsound=True).sound


async def test_an_audit_that_is_not_sound_is_refused_unless_asked_for(tmp_path: Path) -> None:
    """The error names the forged entry. `accept_unsound` restores it and reports it."""
    async with installed(tmp_path) as world:
        with world.database.engine.begin() as connection:
            connection.execute(text("DROP TRIGGER audit_keeps"))
            connection.execute(text("UPDATE audit SET actor = 'another' WHERE link = 2"))
        await world.back_up(tmp_path / "b.backup")
    with pytest.raises(CannotRestore, match=r"the audit of default is not sound: link 2 \(key\.created\)"):
        restore_backup(tmp_path / "b.backup", tmp_path / "new")
    report = restore_backup(tmp_path / "b.backup", tmp_path / "new", accept_unsound=True)
    assert not report.sound
    assert [(each.tenant, each.links) for each in report.audits] == [("default", 1)]


def test_existing_data_is_replaced_only_on_request(made: Path, tmp_path: Path) -> None:
    """With `replace`, the old data is moved aside as a whole, and data that no backup holds stays."""
    data = tmp_path / "data"
    (data / "store").mkdir()
    (data / "kelvin.db-wal").write_bytes(b"of another database")
    before = (data / "admin.key").read_bytes()
    with pytest.raises(OSError, match="is not empty"):
        restore_backup(made, data)
    assert (data / "admin.key").read_bytes() == before
    report = restore_backup(made, data, replace=True)
    assert report.aside is not None
    assert (Path(report.aside) / "admin.key").read_bytes() == before
    assert (Path(report.aside) / "kelvin.db-wal").exists()
    assert (data / "store").is_dir()
    assert not (data / "kelvin.db-wal").exists()
    assert ids(data / "kelvin.db") == ["req-1", "req-2"]


@pytest.mark.deep
def test_restore_interrupted_at_any_rename_can_resume(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either nothing has changed, or a mark file exists and the same command completes the restore. Old data is never
    lost.
    """
    real, left = os.rename, [0]

    def rename(*paths: Any, **more: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(*paths, **more)

    monkeypatch.setattr(os, "rename", rename)
    for cut in range(40):
        data = tmp_path / f"cut{cut}"
        data.mkdir()
        (data / "admin.key").write_text("old")
        left[0] = cut
        try:
            restore_backup(made, data, replace=True)
        except KeyboardInterrupt:
            marked = (data / restore_target.IN_PROGRESS_FILE).exists()
            assert marked or (data / "admin.key").read_text() == "old"
            left[0] = 1000
            if marked:
                restore_backup(made, data)
            else:
                restore_backup(made, data, replace=True)
        else:
            break
        assert not (data / restore_target.IN_PROGRESS_FILE).exists()
        assert ids(data / "kelvin.db") == ["req-1", "req-2"]
        assert "old" in {path.read_text() for path in data.glob("replaced-*/admin.key")}
    assert cut > 5


@pytest.mark.deep
def test_the_program_says_what_it_did(made: Path, tmp_path: Path) -> None:
    """Success prints JSON and exits with 0, failure prints one line and exits with 1. Without a directory it checks."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "controlplane.backup.restore_program", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = run(str(made))
    assert (done.returncode, json.loads(done.stdout)["placed"]) == (0, [])
    made.write_bytes(made.read_bytes()[:-1])
    refused = run(str(made), str(tmp_path / "new"))
    assert refused.returncode == 1
    assert refused.stderr.startswith("made.backup: ")
    assert len(refused.stderr.splitlines()) == 1
