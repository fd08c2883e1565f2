"""`python -m controlplane.restore SOURCE DATA`: a backup, and the journal behind it, as a data directory again.

All is unpacked, put together and verified beside what is there; then names are changed, between two marks. Cut before
them, nothing has happened; cut between them, `kelvin up` refuses to start, and the same command ends it.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import delete, func, insert, select, text

from contracts.backup import BackupIndex, RestoreReport
from controlplane import schema
from controlplane.archive import BadBackup, unpack
from controlplane.backup_place import backups_in
from controlplane.backups import DATABASE, NAMES, UNSHIPPED
from controlplane.journal import Entry, entries_after, entry_of, joined, lost_after, payloads_after
from controlplane.ledger_migrations import NewerLedger
from controlplane.ledger_schema import IN_USE, UNKNOWN, journal_position
from controlplane.migrations import NewerDatabase
from controlplane.placing import STAGING, place
from controlplane.program import reporting
from controlplane.replay import replay
from controlplane.store import Database, open_database
from controlplane.usage_batches import Unreadable
from controlplane.verify import soundness_of
from service.private import keep_secrets
from spool.frame import Frame, decode_frame


class CannotRestore(Exception):
    """Nothing was put in place; the text says why."""


def restore(source: Path, data: Path | None, *, replace: bool, accept_unsound: bool) -> RestoreReport:
    """Restore into `data`; without it only check. `source` is a file, or a place with its journal: then the newest
    backup that is whole. Raises CannotRestore, OSError.
    """
    began_ns = time.monotonic_ns()
    with _staging(data) as staging:
        taken, index, passed_over = _unpacked(source, staging)
        with closing(_opened(staging / DATABASE)) as database:
            _check_pages(database)
            # The journal first: it says whether a record that was unshipped came before or after its month was closed.
            if source.is_dir():
                replayed, missing = _replay_journal(database, source, index)
            else:
                replayed, missing = 0, 0 if data is None else _left_out(source, index)
            waiting = _unshipped(staging / UNSHIPPED, index.made_at_us)
            unreadable = sum(isinstance(entry, Unreadable) for entry in waiting)
            unshipped = replay(database.engine, waiting) - unreadable
            with database.engine.begin() as connection:
                # The backup's is not where the journal is now. Only a new database has no row at all.
                c = journal_position.c
                in_use = connection.execute(select(c.position).where(c.id == IN_USE)).scalar_one_or_none()
                connection.execute(delete(journal_position))
                kept = UNKNOWN if in_use is None else in_use
                connection.execute(insert(journal_position).values(id=IN_USE, position=kept))
            with database.engine.connect() as connection:
                found = soundness_of(connection)
                keys = connection.execute(select(func.count()).select_from(schema.keys)).scalar_one()
        if found.fault is not None and not accept_unsound:
            raise CannotRestore(found.fault)
        placed, aside = ((), None) if data is None else place(staging, data, replace=replace)
    return RestoreReport(
        source=str(taken),
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
        took_us=(time.monotonic_ns() - began_ns) // 1000,
    )


@contextmanager
def _staging(data: Path | None) -> Iterator[Path]:
    """An empty directory of ours, gone afterwards: on the disk that the files are for."""
    if data is None:
        with tempfile.TemporaryDirectory(prefix="kelvin-check-") as path:
            yield Path(path)
        return
    staging = data / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # of one that was cut
    staging.mkdir(mode=0o700, parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpacked(source: Path, staging: Path) -> tuple[Path, BackupIndex, list[str]]:
    """The newest file that is whole, what it says, and why newer ones were passed over."""
    candidates = [path for _, path in reversed(backups_in(source))] if source.is_dir() else [source]
    passed_over: list[str] = []
    for path in candidates:
        try:
            with path.open("rb") as archive:
                index = unpack(archive, {name: staging / name for name in NAMES})
            if not (staging / DATABASE).exists() or not (staging / UNSHIPPED).exists():
                raise BadBackup("it holds no database")
            return path, index, passed_over
        except (BadBackup, OSError) as bad:
            passed_over.append(f"{path.name}: {bad}")
            for name in NAMES:
                (staging / name).unlink(missing_ok=True)
    raise CannotRestore("; ".join(passed_over) or f"{source} holds no backup")


def _opened(path: Path) -> Database:
    """Migrated to this program's schema, as at any start."""
    try:
        return open_database(path)
    except (NewerDatabase, NewerLedger) as newer:
        raise CannotRestore(str(newer)) from newer


def _check_pages(database: Database) -> None:
    with database.engine.connect() as connection:
        found = connection.execute(text("PRAGMA quick_check(1)")).scalar_one()
    if found != "ok":
        raise CannotRestore(f"the database is damaged: {found}")


def _unshipped(path: Path, made_at_us: int) -> list[Entry]:
    """Return the records that waited in spools when the backup was made."""
    return [entry_of(payload, made_at_us) for _, payload in joined(_frames_in(path.read_bytes()))]


def _frames_in(content: bytes) -> Iterator[Frame]:
    offset = 0
    while (frame := decode_frame(content, offset)) is not None:
        yield frame
        offset = frame.end


def _replay_journal(database: Database, place: Path, index: BackupIndex) -> tuple[int, int | None]:
    """How many entries came after the backup, and how many should have and did not."""
    if index.journal_after is None:
        return 0, 0
    try:
        replayed = replay(database.engine, (entry for _, entry in entries_after(place, index.journal_after)))
    except ValueError as error:
        raise CannotRestore(f"the journal holds {error}: restore with the program that wrote it") from error
    return replayed, lost_after(place, index.journal_after)


def _left_out(file: Path, index: BackupIndex) -> int:
    """Return how many entries of the journal beside a backup's file come after it. They are not entered."""
    if index.journal_after is None:
        return 0
    return sum(1 for _ in payloads_after(file.parent, index.journal_after))


def main(arguments: Sequence[str] | None = None) -> int:
    """The report as JSON on standard output, or one line on standard error and exit status 1."""
    keep_secrets()
    parser = argparse.ArgumentParser(prog="python -m controlplane.restore")
    parser.add_argument("source", type=Path)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--accept-unsound", action="store_true")
    given = parser.parse_args(arguments)
    return reporting(
        lambda: restore(given.source, given.data, replace=given.replace, accept_unsound=given.accept_unsound),
        CannotRestore,
    )


if __name__ == "__main__":
    sys.exit(main())
