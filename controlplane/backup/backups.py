"""Make backups of an installation, reading its parts in an order in which no record can be missed.

Records move from the spools to the database. So the spools are read first, the journal's end second, the database last:
a record that was durable when the backup began is in at least one part. A record in two parts is harmless.

`python -m controlplane.backup.backups DATA` writes a backup of a stopped installation to standard output.
"""

import argparse
import asyncio
import errno
import importlib.metadata
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from sqlalchemy import Connection, select

from controlplane.backup.archive import ArchiveWriter
from controlplane.backup.cli_program import run_cli_program
from controlplane.db import schema
from controlplane.db.availability import check_file_headers, check_pages, translate_damage
from controlplane.db.database import Database, copy_file, open_database
from controlplane.db.ledger_migrations import NewerLedger
from controlplane.db.ledger_schema import IN_USE, journal_position
from controlplane.db.migrations import NewerDatabase
from controlplane.ledger.ledger_journal import LIFETIME, REQUEST, LedgerJournal, OlderDatabase, split_payload
from kelvin.contracts.accounting.backup_reports import BACKUP_FORMAT, BackupIndex, BackupVersion
from kelvin.contracts.errors import Conflict, Refused
from kelvin.contracts.setting_parser import BadSetting
from kelvin.process.hardening import protect_memory
from kelvin.spool.frame import encode_frame
from kelvin.spool.inspection import unshipped

DATABASE: Final = "kelvin.db"
UNSHIPPED: Final = "unshipped"
INSTALLATION_FILE: Final = "installation"
# Secrets and identity, beside the database. Missing ones are left out.
FILES: Final = ("admin.key", "default.key", "ca.pem", "tls/ca.key", "attest.key", "once.key", INSTALLATION_FILE)
NAMES: Final = (*FILES, UNSHIPPED, DATABASE)
DRAFT: Final = ".backup-"
_LIFETIMES: Final = "supervisor-"  # every other source holds request records


def remove_draft_copies(directory: Path) -> None:
    """Remove incomplete copies of a process that was killed."""
    for draft in directory.glob(f"{DRAFT}*"):
        shutil.rmtree(draft, ignore_errors=True)


class BackupCancelled(Exception):
    """The process is ending, and the backup was not finished."""


@dataclass(frozen=True, slots=True)
class BackupSnapshot:
    """The first part of a backup: the data that has to be read on the event loop."""

    made_at_us: int
    unshipped: bytes  # frames, as in a journal
    journal_after: int | None
    versions: tuple[BackupVersion, ...]


class Backups:
    """Makes backups of one data directory while it is in use."""

    def __init__(self, data: Path, database: Database, journal: LedgerJournal | None) -> None:
        self._data = data
        self._database = database
        self._journal = journal

    def __repr__(self) -> str:
        return f"<Backups {self._data} journal={self._journal!r}>"

    @property
    def data(self) -> Path:
        """The directory that is backed up."""
        return self._data

    def has_all_files(self) -> bool:
        """Return whether all of FILES exist, so that a later backup adds none."""
        return all((self._data / name).is_file() for name in FILES)

    def files_state(self) -> tuple[object, ...]:
        """Return a value that changes when any of FILES changes."""
        return tuple(_changed_ns(self._data / name) for name in FILES)

    def check(self) -> None:
        """Raise Refused(Conflict) if the database is PostgreSQL, which has its own means of backup."""
        self._database.check_copied()

    async def begin(self) -> BackupSnapshot:
        """Read the spools, then the journal's end and the versions. Raises OSError, and Refused(Conflict) if the
        database lacks records that the journal has committed: a restore of the backup would lack them, too.
        """
        made_at_us = time.time_ns() // 1000
        waiting = await asyncio.to_thread(_read_spools, self._data / "spool")
        # On the writer thread no transaction is half done: entries of the journal are in the database, too.
        after = await self._database.write(self._journal_end)
        found = await self._database.read(lambda connection: connection.execute(_VERSIONS).all())
        versions = tuple(BackupVersion(tenant=t, model=m, version=v, total_bytes=b) for t, m, v, b in found)
        return BackupSnapshot(made_at_us, waiting, after, versions)

    def _journal_end(self, connection: Connection) -> int | None:
        c = journal_position.c
        known = {row.id: row.position for row in connection.execute(select(c.id, c.position))}
        if self._journal is None:
            # The installation is stopped, or has no journal. Return the position in the last used journal, if any.
            in_use = known.get(IN_USE, 0)
            return known.get(in_use) if in_use else None
        position = known.get(self._journal.number, None if IN_USE in known else 0)  # as `Ledger._append_to_journal`
        if position is not None:
            try:
                self._journal.check(position)
            except OlderDatabase as older:
                raise Refused(Conflict("backup", f"{older}: use `kelvin restore`")) from older
        return self._journal.committed

    def pieces(self, snapshot: BackupSnapshot, scratch: Path, stop: threading.Event | None = None) -> Iterator[bytes]:
        """Yield the archive. Blocking. `scratch` needs room for a copy of the database, which is removed at the end.

        Raises BackupCancelled once `stop` is set, and OSError; if there is no room for the copy, before the first
        piece. Close the iterator if you do not read it to its end.
        """
        with tempfile.TemporaryDirectory(prefix=DRAFT, dir=scratch) as draft:
            # The copy may find no room. Make it before the first piece, so that the answer can still be an error.
            copy = Path(draft) / DATABASE
            self._database.copy(copy)
            yield from self.archive(snapshot, copy, stop)

    def archive(self, snapshot: BackupSnapshot, copy: Path, stop: threading.Event | None = None) -> Iterator[bytes]:
        """Yield the archive with this copy of the database. Raises BackupCancelled once `stop` is set, and OSError."""
        packing = ArchiveWriter()
        for name in FILES:
            path = self._data / name
            if path.is_file():
                yield from packing.content_pieces(name, path.read_bytes())
        yield from packing.content_pieces(UNSHIPPED, snapshot.unshipped)
        with copy.open("rb") as file:
            for piece in packing.file_pieces(DATABASE, file, os.fstat(file.fileno()).st_size):
                if stop is not None and stop.is_set():
                    raise BackupCancelled
                yield piece
        index = BackupIndex(
            format=BACKUP_FORMAT,
            made_at_us=snapshot.made_at_us,
            program=importlib.metadata.version("kelvin-serving"),
            journal_after=snapshot.journal_after,
            members=tuple(packing.members),
            versions=snapshot.versions,
        )
        yield from packing.end_pieces(index)


_VERSIONS: Final = (
    select(schema.versions.c.tenant, schema.versions.c.model, schema.versions.c.version, schema.versions.c.total_bytes)
    .where(schema.versions.c.state != "deleted")
    .order_by(schema.versions.c.tenant, schema.versions.c.model, schema.versions.c.version)
)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _read_spools(spools: Path) -> bytes:
    """Return every record in a spool that the ledger has not acknowledged, as frames of a journal.

    Records are copied undecoded, so that an unreadable one does not stop the backup.
    """
    frames: list[bytes] = []
    for source, frame in unshipped(spools):
        kind = LIFETIME if source.startswith(_LIFETIMES) else REQUEST
        for piece in split_payload(kind + frame.payload):
            frames.append(encode_frame(len(frames) + 1, piece))
    return b"".join(frames)


def back_up_stopped(data: Path, out: BinaryIO) -> None:
    """Write a backup of a stopped installation. Its kelvin.db keeps its schema, so that an older program can still use
    it; only a copy is migrated.

    Raises BadSetting for a damaged kelvin.db, NewerDatabase, NewerLedger, OSError, sqlite3.Error, DBAPIError.
    """
    check_file_headers(data / DATABASE)
    with tempfile.TemporaryDirectory(prefix=DRAFT, dir=data) as draft:
        copy = Path(draft) / DATABASE
        with closing(sqlite3.connect(data / DATABASE)) as source:
            copy_file(source, copy)
        with translate_damage(data / DATABASE), closing(open_database(copy)) as database:
            check_pages(database, data / DATABASE)
            backups = Backups(data, database, None)
            snapshot = asyncio.run(backups.begin())
        if copy.with_name(f"{DATABASE}-wal").exists():  # closing could not write all of the log back
            raise OSError(errno.ENOSPC, "there is no room for a copy of the database", str(data))
        for piece in backups.archive(snapshot, copy):
            out.write(piece)
    out.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the backup to standard output. On a failure write one line to standard error, and return 1."""
    protect_memory()
    parser = argparse.ArgumentParser(prog="python -m controlplane.backup.backups")
    parser.add_argument("data", type=Path)
    data = parser.parse_args(arguments).data
    refusals = (BadSetting, NewerDatabase, NewerLedger, sqlite3.Error)

    def write() -> None:
        # With PYTHONUNBUFFERED `sys.stdout.buffer` ignores a short write, such as one that a signal interrupts.
        with open(1, "wb", closefd=False) as out:  # on a full disk, closing fails again
            back_up_stopped(data, out)

    return run_cli_program(write, *refusals)


if __name__ == "__main__":
    sys.exit(main())
