"""Put restored files in their place: a data directory, or an empty database.

Existing files of a data directory are moved aside, never removed. A database with any rows is refused.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, Table, inspect, literal, select, text
from sqlalchemy.exc import DBAPIError

from controlplane.backup.backups import DATABASE, FILES
from controlplane.db import ledger_schema, schema
from controlplane.db.database import disposing, reading_engine, stream_rows
from controlplane.db.dialects import disable_statement_timeout
from controlplane.db.ledger_migrations import NewerLedger, ensure_ledger
from controlplane.db.migrations import NewerDatabase, migrate
from controlplane.db.postgres_url import PostgresUrl
from controlplane.ledger.received_sequences import insert_rows
from kelvin.contracts.setting_parser import BadSetting
from kelvin.process.atomic_file import sync

STAGING: Final = ".restore"
IN_PROGRESS_FILE: Final = "restoring"  # `kelvin/supervisor/installation_supervisor.py` knows it, too
_DATABASE_FILES: Final = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
_IGNORED_NAMES: Final = frozenset({STAGING, IN_PROGRESS_FILE, "lock"})
_LOST_AND_FOUND: Final = "lost+found"  # exists if the data directory is the root of a file system
TABLES: Final = (*schema.metadata.sorted_tables, *ledger_schema.metadata.sorted_tables)
_ROWS: Final = 2_000  # at a time


class CannotRestore(Exception):
    """Nothing was put in place. The text is the reason."""


class NotEmpty(OSError):
    """The data directory has files that may not be replaced, or the database has rows."""


def install_files(staging: Path, data: Path, *, replace: bool) -> tuple[tuple[str, ...], str | None]:
    """Put the restored files in place. Return their names, and the directory with the old files, if any. Raises
    NotEmpty, OSError.

    A mark file exists from before the first change until the last one is durable. If it exists already, an earlier
    restore was interrupted: the files are a mix of old and new, and may be replaced.
    """
    check_data(data, replace=replace)
    mark = data / IN_PROGRESS_FILE
    _check_closed(staging)
    for path in (staging / DATABASE, *(staging / name for name in FILES)):
        if path.exists():
            sync(path)
    mark.touch(mode=0o600)
    sync(data)
    aside = _move_aside(data)
    placed = []
    for name in (*FILES, DATABASE):
        if (staging / name).exists():
            (data / name).parent.mkdir(mode=0o700, exist_ok=True)
            (staging / name).rename(data / name)
            sync((data / name).parent)
            placed.append(name)
    sync(data)
    mark.unlink()
    sync(data)
    return tuple(placed), None if aside is None else str(aside)


def check_data(data: Path, *, replace: bool) -> None:
    """Raise NotEmpty if the data directory has files that may not be replaced."""
    existing_names = sorted({entry.name for entry in data.iterdir()} - _IGNORED_NAMES - {_LOST_AND_FOUND})
    if existing_names and not replace and not (data / IN_PROGRESS_FILE).exists():
        raise NotEmpty(
            f"{data} is not empty ({', '.join(existing_names[:5])}): restore into another one, or use --replace"
        )


def _move_aside(data: Path) -> Path | None:
    """Move away all files that a backup can hold. SQLite must never apply an old log to the restored database."""
    existing_names = [name for name in (*_DATABASE_FILES, *FILES) if (data / name).exists()]
    if not existing_names:
        return None
    aside = data / f"replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    while aside.exists():
        aside = aside.with_name(aside.name + "x")
    aside.mkdir(mode=0o700)
    for name in existing_names:
        (aside / name).parent.mkdir(mode=0o700, exist_ok=True)
        (data / name).rename(aside / name)
    sync(aside)
    return aside


def check_empty(database: Path | PostgresUrl) -> None:
    """Raise NotEmpty if the database has any content. Creates nothing, since a mistyped name may be another database.
    Raises CannotRestore if the database can't be read.
    """
    if isinstance(database, Path):
        for path in (database, *(database.with_name(f"{database.name}-{log}") for log in ("wal", "shm"))):
            if path.exists() and path.stat().st_size:
                raise NotEmpty(f"{path} is there, and not empty: name another file")
        return
    with (
        _translate_errors(str(database)),
        disposing(reading_engine(database)) as engine,
        engine.connect() as connection,
    ):
        _check_no_rows(connection, database)


def install_database_file(staging: Path, database: Path) -> None:
    """Rename the restored file to `database`, on the same disk. Raises NotEmpty, OSError."""
    _check_closed(staging)
    check_empty(database)
    sync(staging / DATABASE)
    (staging / DATABASE).rename(database)
    sync(database.parent)


def copy_into_postgres(restored: Engine, database: PostgresUrl) -> None:
    """Copy every row of the restored file to PostgreSQL in one transaction. It commits only after every row was read
    back and compared. Raises NotEmpty, CannotRestore.
    """
    from controlplane.db.postgres import Postgres  # its driver is an extra

    with _translate_errors(str(database)), closing(Postgres(database, 1)) as target:
        migrate(target.writing)
        ensure_ledger(target.writing)
        with restored.connect() as source:
            target.commit(partial(_copy, source, database), repeated=False)


def _check_closed(staging: Path) -> None:
    if any((staging / name).exists() for name in _DATABASE_FILES[1:]):
        raise OSError("the restored database was not closed: its log is still beside it")


@contextmanager
def _translate_errors(where: str) -> Iterator[None]:
    """Translate errors of the database to CannotRestore, without values of rows."""
    try:
        yield
    except (NewerDatabase, NewerLedger, BadSetting) as refused:
        raise CannotRestore(str(refused)) from refused
    except DBAPIError as error:
        primary = getattr(getattr(error.orig, "diag", None), "message_primary", None)  # its other texts hold values
        why = primary or (str(error.orig).strip().splitlines() or ["it can't be used"])[0]
        raise CannotRestore(f"{where}: {why}") from error


def _check_no_rows(connection: Connection, database: PostgresUrl) -> None:
    existing_tables = set(inspect(connection).get_table_names())
    for table in TABLES:
        if table.name in existing_tables and connection.execute(select(literal(1)).select_from(table).limit(1)).first():
            rule = f"{database} is not empty (there are rows in {table.name}): create another database"
            raise NotEmpty(f"{rule}, or drop and recreate this one")


def _copy(source: Connection, database: PostgresUrl, target: Connection) -> None:
    disable_statement_timeout(target)
    target.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))  # while the file is read
    _check_no_rows(target, database)  # this session holds the lock, so no other process writes now
    # The triggers would refuse audit rows that are inserted with an empty body.
    target.execute(text(f"ALTER TABLE {schema.audit.name} DISABLE TRIGGER USER"))
    for table in TABLES:
        with (
            _translate_errors(str(table.name)),
            source.execute(select(table).execution_options(yield_per=_ROWS)) as found,
        ):
            for partition in found.partitions():
                insert_rows(target, table, [tuple(row) for row in partition])
    target.execute(text(f"ALTER TABLE {schema.audit.name} ENABLE TRIGGER USER"))
    for table in TABLES:
        _compare(source, target, table)


def _compare(source: Connection, target: Connection, table: Table) -> None:
    """Compare all rows of a table in the order of their primary keys. Raises CannotRestore."""
    query = select(table).order_by(*table.primary_key)
    for source_row, target_row in zip_longest(stream_rows(source, query, _ROWS), stream_rows(target, query, _ROWS)):
        if source_row is None or target_row is None or tuple(source_row) != tuple(target_row):
            raise CannotRestore(f"{table.name}: the copy differs from the backup")
