"""The schedule backs up changes, removes old backups, and uses only its own installation's directory."""

import asyncio
import errno
import io
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from controlplane.backup.backup_directory import backup_name, claim_backup_directory, list_backups
from controlplane.backup.backup_schedule import open_backups
from controlplane.backup.backups import DATABASE, back_up_stopped
from controlplane.backup.retention_policy import DAY_S, MIN_BACKUPS
from controlplane.clock import SystemClock
from controlplane.db.database import open_database
from controlplane.ledger.ledger_journal import LedgerJournal, journal_extent
from controlplane.ledger.usage_ledger import Ledger
from kelvin.contracts.serving.control_messages import RequestBatch
from kelvin.contracts.setting_parser import BadSetting
from kelvin.process.loops import LoopHealth, Loops
from tests.controlplane.builders import ids, installed, restore_backup
from tests.controlplane.usage_records import request_record
from tests.controlplane.virtual_time import VirtualClock
from tests.eventually import eventually


async def test_a_schedule_writes_only_what_is_new(tmp_path: Path) -> None:
    """Without changes there is no new file, but the newest file's time is updated, so its age stays true."""
    async with installed(tmp_path) as world:
        loop = world.backup_loop()
        assert await loop.make_backup() is not None
        ((_, newest),) = list_backups(world.place)
        os.utime(newest, (1, 1))
        await world.ledger.record_lost_replicas(1)  # runs each minute; usually there is none
        assert await loop.make_backup() is None
        assert newest.stat().st_mtime > 1
        await world.enter(1)
        assert await loop.make_backup() is not None


async def test_schedule_applies_retention_and_trims_journal(tmp_path: Path) -> None:
    """The journal starts at the third newest backup. The retention policy decides about older ones."""
    async with installed(tmp_path) as world:
        loop = world.backup_loop()
        for moment in range(1000, 1000 + 2 * MIN_BACKUPS):
            (world.place / backup_name(moment)).touch()
        for number in range(1, MIN_BACKUPS + 1):
            await world.enter(number)
            await loop.make_backup()
        assert journal_extent(world.place).trimmed == 1
        assert (
            len(list_backups(world.place)) <= MIN_BACKUPS + MIN_BACKUPS
        )  # several may have the same second, and one file
    assert ids(tmp_path / "data" / "kelvin.db") == ["req-1", "req-2", "req-3"]
    assert restore_backup(tmp_path / "place", tmp_path / "new").missing == 0


async def test_old_backup_that_cannot_be_removed_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names it. Other old backups are removed, and the journal is trimmed."""
    async with installed(tmp_path) as world:
        loop = world.backup_loop()
        stuck = world.place / backup_name(1000)
        unlink = Path.unlink

        def unlink_others(path: Path, missing_ok: bool = False) -> None:
            if path == stuck:
                raise PermissionError(errno.EPERM, "it is immutable")
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink_others)
        for moment in range(1000, 1000 + 2 * MIN_BACKUPS):
            (world.place / backup_name(moment)).touch()
        for number in range(1, MIN_BACKUPS + 1):
            await world.enter(number)
            assert await loop.make_backup() is not None
        assert journal_extent(world.place).trimmed == 1
        assert len(list_backups(world.place)) <= MIN_BACKUPS + MIN_BACKUPS
        assert any(stuck.name in str(each.__dict__) for each in caplog.records)


async def test_backup_is_whole_though_the_journal_cannot_be_trimmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports the failed trim, and no failed backup."""

    def fails(_: LedgerJournal, after: int) -> None:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(LedgerJournal, "trim", fails)
    async with installed(tmp_path) as world:
        loop = world.backup_loop()
        for number in range(1, MIN_BACKUPS + 1):
            await world.enter(number)
            assert await loop.make_backup() is not None
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == ["the journal can't be trimmed"]


@pytest.mark.parametrize("is_ahead_at_start", [False, True], ids=["for a while", "at the start"])
async def test_clock_that_is_ahead_for_a_while_removes_no_backup(tmp_path: Path, is_ahead_at_start: bool) -> None:
    """By such a clock all other backups are too old. Control: after an hour it is believed, and the newest stay."""

    class Clock(SystemClock):
        passed_s = ahead_s = 0

        def monotonic_us(self) -> int:
            return self.passed_s * 1_000_000

        def wall_s(self) -> int:
            return now_s + self.passed_s + self.ahead_s

    now_s, clock = int(time.time()), Clock()
    years_s = 4 * 365 * DAY_S
    async with installed(tmp_path) as world:
        old = [world.place / backup_name(now_s - day * DAY_S) for day in range(1, 7)]
        for path in old:
            path.touch()
        clock.ahead_s = years_s if is_ahead_at_start else 0
        loop = world.backup_loop(clock=clock)
        for number, ahead_s in enumerate((clock.ahead_s, years_s, 0, years_s), 1):
            clock.ahead_s = ahead_s
            await world.enter(number)
            await loop.make_backup()
            assert all(path.exists() for path in old)
        clock.passed_s += 3600
        await world.enter(5)
        await loop.make_backup()
        assert not any(path.exists() for path in old[MIN_BACKUPS:])


@pytest.mark.parametrize("is_older_program", [False, True], ids=["this program's", "an older program's"])
async def test_the_newest_is_the_last_one_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_older_program: bool
) -> None:
    """This holds after the clock was wrong. A backup that was made in "2030" must not be restored for ever."""
    async with installed(tmp_path) as world:
        await world.enter(1)
        monkeypatch.setattr(time, "time_ns", lambda: 1_900_000_000 * 10**9)
        in_2030 = await world.backup_loop().make_backup()
        monkeypatch.undo()
        assert in_2030 is not None
        if is_older_program:
            in_2030.rename(in_2030.with_name(backup_name(1_900_000_000)))
        await world.enter(2)
        assert await world.backup_loop().make_backup() == list_backups(world.place)[-1][1]
        assert len(list_backups(world.place)) == 2
    report = restore_backup(tmp_path / "place", tmp_path / "new")
    assert (report.replayed, report.missing) == (0, 0)
    assert report.made_at_us < 1_900_000_000 * 10**6
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-1", "req-2"]


async def test_restarted_processes_trim_the_journal(tmp_path: Path) -> None:
    """Each process makes one backup. The journal keeps what the three newest backups need."""
    async with installed(tmp_path) as world:
        for number in range(1, MIN_BACKUPS + 2):
            await world.enter(number)
            await world.backup_loop().make_backup()
        assert journal_extent(world.place).trimmed == 2
    newest = list_backups(tmp_path / "place")[-1][1]
    newest.write_bytes(b"damaged")
    assert restore_backup(tmp_path / "place", tmp_path / "new").missing == 0
    assert len(ids(tmp_path / "new" / "kelvin.db")) == MIN_BACKUPS + 1


async def test_a_damaged_backup_keeps_the_journal(tmp_path: Path) -> None:
    """It is unknown where its journal entries begin. Newer backups end this state."""
    async with installed(tmp_path) as world:
        for number in range(1, MIN_BACKUPS + 1):
            await world.enter(number)
            made = await world.backup_loop().make_backup()
            if number == 1:
                assert made is not None
                made.write_bytes(b"damaged")
        assert journal_extent(world.place).trimmed == 0
        await world.enter(9)
        await world.backup_loop().make_backup()
        assert journal_extent(world.place).trimmed == 2


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "without a CA"])
async def test_retries_back_off_to_the_interval(tmp_path: Path, fails: bool) -> None:
    """A full disk or a missing CA costs only a few attempts per hour more than the schedule."""
    async with installed(tmp_path) as world:
        clock, moments = VirtualClock(), list[float]()
        if not fails:
            (world.data / "ca.pem").unlink()

        async def make_backup() -> None:
            moments.append(clock.monotonic_us() / 1e6 - 1000)
            if fails:
                raise OSError(errno.ENOSPC, "No space left on device")

        loop = world.backup_loop(every_s=60.0, clock=clock)
        loop.make_backup = make_backup  # type: ignore[method-assign]
        running = asyncio.create_task(loop.run())
        await clock.advance(3600)
        running.cancel()
        assert moments[:6] == [0, 5, 15, 35, 75, 135]
        assert len(moments) <= 4 + 3600 / 60


async def test_a_lost_journal_goes_on_behind_its_backups(tmp_path: Path) -> None:
    """The journal's directory is lost, its backups are not. Later entries are restored, and the loss is reported."""
    async with installed(tmp_path) as world:
        for number in range(1, 4):
            await world.enter(number)
        await world.backup_loop().make_backup()
    data, place = tmp_path / "data", tmp_path / "place"
    shutil.rmtree(place / "journal")
    async with AsyncExitStack() as stack:
        database = stack.enter_context(closing(open_database(data / "kelvin.db")))
        ledger = Ledger(database, await open_backups(stack, data, place))
        await ledger.write_due_marks()
        await ledger.append_requests(RequestBatch(records=(request_record(4), request_record(5))))
    report = restore_backup(place, tmp_path / "new")
    assert ids(tmp_path / "new" / "kelvin.db") == ["req-1", "req-2", "req-3", "req-4", "req-5"]
    assert (report.replayed, report.missing) == (2, 1)


async def test_foreign_entries_of_a_place_are_passed_over(tmp_path: Path) -> None:
    """Files and directories with names like those of backups are neither restored nor removed."""
    foreign = ("lost+found", "kelvin-20990101T000000Z.backup", "kelvin-a.backup", "kelvin-20261399T000000Z-9.backup")
    async with installed(tmp_path) as world:
        for name in foreign:
            (world.place / name / "a" / "b" / "c").mkdir(parents=True)
        (world.place / "kelvin-stray.backup").touch()
        claim_backup_directory(world.place, world.data)
        await world.enter(1)
        for _ in range(MIN_BACKUPS):
            await world.backup_loop().make_backup()
    assert restore_backup(tmp_path / "place", tmp_path / "new").missing == 0
    assert all((tmp_path / "place" / name).is_dir() for name in foreign)


async def test_a_place_belongs_to_one_installation(tmp_path: Path) -> None:
    """A fresh data directory would remove the backups of a lost one. The error names the setting and the rule."""
    async with installed(tmp_path):
        pass
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with pytest.raises(BadSetting, match=r"KELVIN_BACKUP=.*holds the backups of another installation"):
        claim_backup_directory(tmp_path / "place", fresh)
    claim_backup_directory(tmp_path / "place", tmp_path / "data")


@pytest.mark.parametrize("content", [b"", bytes(33), b"0123456789abcdef", b"\xff"])
@pytest.mark.parametrize("damaged", ["data", "place"])
def test_damaged_installation_file_is_refused(tmp_path: Path, damaged: str, content: bytes) -> None:
    """The error names the file, which stays unchanged."""
    (tmp_path / "data").mkdir()
    claim_backup_directory(tmp_path / "place", tmp_path / "data")
    path = tmp_path / damaged / "installation"
    path.write_bytes(content)
    with pytest.raises(BadSetting, match=rf"{path} holds no installation name: copy the file"):
        claim_backup_directory(tmp_path / "place", tmp_path / "data")
    assert path.read_bytes() == content


async def test_unexpected_backup_error_ends_the_run(tmp_path: Path) -> None:
    """The error comes from neither the disk nor the database. The loop counts it and starts again."""
    async with installed(tmp_path) as world:
        health, loop = LoopHealth(), world.backup_loop()
        pieces = world.backups.pieces

        def defective(*given: Any) -> Any:
            if not health.errors:
                raise KeyError("a defect")
            return pieces(*given)

        world.backups.pieces = defective  # type: ignore[method-assign, assignment]
        async with Loops(health) as loops:
            loops.start("backups", loop.run)
            await eventually(lambda: list_backups(world.place), "a backup is made")
        assert health.errors == {"backups": 1}


def test_full_disk_of_a_copy_is_no_defect(tmp_path: Path) -> None:
    """SQLite's error is raised as an error of the disk."""
    database = open_database(tmp_path / "kelvin.db")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="the database can't be copied"):
            database.copy(tmp_path / "copy.db")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        database.close()


def test_full_disk_of_a_stopped_installation_is_named(tmp_path: Path) -> None:
    """With a few KiB free, SQLite cannot create the index of its log and only says `disk I/O error`."""
    open_database(tmp_path / "kelvin.db").close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="there is no room for a copy of the database"):
            back_up_stopped(tmp_path, io.BytesIO())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_standard_output_is_one_line(tmp_path: Path) -> None:
    """Closing the output fails a second time, without a second line."""
    with closing(open_database(tmp_path / DATABASE)):
        pass
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "controlplane.backup.backups", str(tmp_path)]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 1
    assert ended.stderr.decode().count("\n") == 1
