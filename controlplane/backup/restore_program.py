"""Restore a data directory: `python -m controlplane.backup.restore_program SOURCE DATA`, from a backup and its journal.

Everything is unpacked, put together and verified beside the existing files. Then a mark file is set, files are renamed,
and the mark is removed. If the program is interrupted before the mark, nothing has changed. If it is interrupted after
it, `kelvin up` refuses to start, and the same command finishes the restore. `restore_target.py` does that part; with
`--database` it fills an empty database instead.
"""

import argparse
import errno
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, delete, func, insert, select
from sqlalchemy.exc import DBAPIError

from controlplane.backup.archive import BadBackup, unpack
from controlplane.backup.backup_directory import list_backups
from controlplane.backup.backups import DATABASE, NAMES, UNSHIPPED
from controlplane.backup.cli_program import run_cli_program
from controlplane.backup.restore_target import (
    STAGING,
    CannotRestore,
    check_data,
    check_empty,
    copy_into_postgres,
    install_database_file,
    install_files,
)
from controlplane.db import schema
from controlplane.db.database import Database, open_database
from controlplane.db.ledger_migrations import NewerLedger
from controlplane.db.ledger_schema import IN_USE, UNKNOWN, journal_position
from controlplane.db.migrations import NewerDatabase
from controlplane.db.postgres_url import BadPostgresUrl, PostgresUrl, parse_postgres_url
from controlplane.ledger.closed_months import closed_report, prices_of, store_closing
from controlplane.ledger.ledger_journal import (
    ClosedMonthEntry,
    JournalEntry,
    count_lost_after,
    decode_entry,
    entries_after,
    join_pieces,
    payloads_after,
)
from controlplane.ledger.usage_batches import Unreadable
from controlplane.ledger.usage_ledger import append_lifetimes, append_requests, keep_aside
from controlplane.ledger_check.ledger_verification import verify_all_chains
from kelvin.contracts.accounting.backup_reports import BackupIndex, RestoreReport
from kelvin.contracts.accounting.usage import LifetimeRecord, RequestRecord
from kelvin.process.hardening import protect_memory
from kelvin.spool.frame import Frame, decode_frame

BATCH: Final = 500  # entries in a transaction
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk that is unpacked to


def restore(
    source: Path,
    data: Path | None,
    *,
    replace: bool,
    accept_unsound: bool,
    database: Path | PostgresUrl | None = None,
) -> RestoreReport:
    """Restore into `data`, or only the database into an empty `database`; without either only check. `source` is a
    backup file, or a backup place with its journal, of which the newest whole backup is used. Raises CannotRestore,
    OSError.
    """
    began_ns = time.monotonic_ns()
    is_checked = data is None and database is None
    if database is not None:
        check_empty(database)
    if data is not None and data.exists():
        check_data(data, replace=replace)
    with _staging(data, database) as staging:
        restored_file, index, passed_over = _unpack_newest(source, staging)
        with closing(_open_restored(staging / DATABASE)) as restored:
            _check_pages(restored)
            # Replay the journal first. It decides whether an unshipped record came before or after a month was closed.
            if source.is_dir():
                replayed, missing = _replay_journal(restored, source, index)
            else:
                replayed, missing = 0, 0 if is_checked else _count_newer_entries(source, index)
            waiting = _decode_spooled(staging / UNSHIPPED, index.made_at_us)
            unreadable = sum(isinstance(entry, Unreadable) for entry in waiting)
            unshipped = replay(restored.engine, waiting) - unreadable
            with restored.engine.begin() as connection:
                # The backup's journal position is outdated. Only a new database has no row at all.
                c = journal_position.c
                in_use = connection.execute(select(c.position).where(c.id == IN_USE)).scalar_one_or_none()
                connection.execute(delete(journal_position))
                position = UNKNOWN if in_use is None else in_use
                connection.execute(insert(journal_position).values(id=IN_USE, position=position))
            with restored.engine.connect() as connection:
                found = verify_all_chains(connection)
                keys = connection.execute(select(func.count()).select_from(schema.keys)).scalar_one()
            if found.fault is not None and not accept_unsound:
                raise CannotRestore(found.fault)
            if isinstance(database, PostgresUrl):
                copy_into_postgres(restored.engine, database)
        if isinstance(database, Path):
            install_database_file(staging, database)
        placed, aside = ((), None) if data is None else install_files(staging, data, replace=replace)
    return RestoreReport(
        source=str(restored_file),
        passed_over=tuple(passed_over),
        made_at_us=index.made_at_us,
        unshipped=unshipped,
        unreadable=unreadable,
        replayed=replayed,
        missing=missing,
        chains=found.ledger,
        audits=found.audits,
        keys=keys,
        versions=index.versions,
        placed=placed,
        aside=aside,
        database=None if database is None else str(database),
        took_us=(time.monotonic_ns() - began_ns) // 1000,
    )


@contextmanager
def _staging(data: Path | None, database: Path | PostgresUrl | None) -> Iterator[Path]:
    """Yield an empty directory on the disk that the files are for. Remove it afterwards."""
    if data is None:
        parent = database.parent if isinstance(database, Path) else None
        with tempfile.TemporaryDirectory(prefix=f"{STAGING}-", dir=parent) as path:
            yield Path(path)
        return
    staging = data / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # left by an interrupted restore
    staging.mkdir(mode=0o700, parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpack_newest(source: Path, staging: Path) -> tuple[Path, BackupIndex, list[str]]:
    """Unpack the newest whole backup. Return its file, its index, and why newer files were passed over. Raises
    CannotRestore, and OSError if there is no room for the newest.
    """
    candidates = [path for _, path in reversed(list_backups(source))] if source.is_dir() else [source]
    passed_over: list[str] = []
    for path in candidates:
        try:
            with path.open("rb") as archive:
                index = unpack(archive, {name: staging / name for name in NAMES})
            if not (staging / DATABASE).exists() or not (staging / UNSHIPPED).exists():
                raise BadBackup("it holds no database")
            return path, index, passed_over
        except (BadBackup, OSError) as bad:
            if isinstance(bad, OSError) and bad.errno in _NO_ROOM:
                raise  # an older backup might fit, but lacks newer records
            passed_over.append(f"{path.name}: {bad}")
            for name in NAMES:
                (staging / name).unlink(missing_ok=True)
    raise CannotRestore("; ".join(passed_over) or f"{source} holds no backup")


def _open_restored(path: Path) -> Database:
    """Open the database and migrate it to this program's schema. Raises CannotRestore."""
    try:
        return open_database(path)
    except (NewerDatabase, NewerLedger) as newer:
        raise CannotRestore(str(newer)) from newer
    except DBAPIError as error:
        raise CannotRestore(f"the database can't be opened: {error.orig}") from error


def _check_pages(database: Database) -> None:
    if (found := database.damage()) is not None:
        raise CannotRestore(f"the database is damaged: {found}")


def _decode_spooled(path: Path, made_at_us: int) -> list[JournalEntry]:
    """Return the records that waited in spools when the backup was made."""
    return [decode_entry(payload, made_at_us) for _, payload in join_pieces(_frames_in(path.read_bytes()))]


def _frames_in(content: bytes) -> Iterator[Frame]:
    offset = 0
    while (frame := decode_frame(content, offset)) is not None:
        yield frame
        offset = frame.end


def _replay_journal(database: Database, place: Path, index: BackupIndex) -> tuple[int, int | None]:
    """Return how many entries after the backup were replayed, and how many are missing from the journal."""
    if index.journal_after is None:
        return 0, 0
    try:
        replayed = replay(database.engine, (entry for _, entry in entries_after(place, index.journal_after)))
    except ValueError as error:
        raise CannotRestore(f"the journal holds {error}: restore with the version of Kelvin that wrote it") from error
    return replayed, count_lost_after(place, index.journal_after)


def _count_newer_entries(file: Path, index: BackupIndex) -> int:
    """Return how many entries of the journal beside a backup file are newer than it. They are not entered."""
    if index.journal_after is None:
        return 0
    return sum(1 for _ in payloads_after(file.parent, index.journal_after))


def replay(engine: Engine, entries: Iterable[JournalEntry]) -> int:
    """Enter the entries again, in their order. Return how many there were.

    Entries that are in the database change nothing, so a journal may reach back before the backup. Durable on return,
    batch by batch. It may be stopped at any point and run again.
    """
    count = 0
    for batch in _batches(entries):
        with engine.begin() as connection:
            _append_batch(connection, batch)
        count += len(batch)
    return count


def _batches(entries: Iterable[JournalEntry]) -> Iterator[list[JournalEntry]]:
    """Yield batches of entries, each of one kind."""
    for _, alike in groupby(entries, type):
        batch: list[JournalEntry] = []
        for entry in alike:
            batch.append(entry)
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch


def _append_batch(connection: Connection, batch: list[JournalEntry]) -> None:
    append_requests(connection, [entry for entry in batch if isinstance(entry, RequestRecord)])
    append_lifetimes(connection, [entry for entry in batch if isinstance(entry, LifetimeRecord)])
    if unreadable := [entry for entry in batch if isinstance(entry, Unreadable)]:
        keep_aside(connection, unreadable)
    for entry in batch:
        if isinstance(entry, ClosedMonthEntry):
            report = entry.report
            if closed_report(connection, report.tenant, report.month) is None:
                store_closing(connection, prices_of(entry.prices), report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report as JSON on standard output, or one line on standard error. Return the exit status, 0 or 1."""
    protect_memory()
    parser = argparse.ArgumentParser(prog="python -m controlplane.backup.restore_program")
    parser.add_argument("source", type=Path)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--accept-unsound", action="store_true")
    parser.add_argument("--database")
    parser.add_argument("--password-file", type=Path)
    options = parser.parse_args(arguments)
    return run_cli_program(
        lambda: restore(
            options.source,
            options.data,
            replace=options.replace,
            accept_unsound=options.accept_unsound,
            database=_parse_database(options.database, options.password_file),
        ),
        CannotRestore,
    )


def _parse_database(word: str | None, password_file: Path | None) -> Path | PostgresUrl | None:
    """Return a PostgreSQL URL, or the path of a file. Raises CannotRestore for a bad URL."""
    if word is None:
        return None
    if "://" not in word:
        return Path(word)
    try:
        return parse_postgres_url(word, password_file)
    except BadPostgresUrl as bad:
        raise CannotRestore(f"--database: {bad}") from bad


if __name__ == "__main__":
    sys.exit(main())
