"""Run transactions of the control plane's database: one engine, one writer thread, a few readers. Stores know the
tables.

The database is SQLite in WAL mode with synchronous=FULL, or PostgreSQL: a commit that returned survives a power cut.
One thread writes, so no transaction of ours waits for another one's lock. Readers see the last commit and block
nothing. All SQL is SQLAlchemy Core.
"""

import asyncio
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from sqlite3 import Connection as SqliteConnection
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    LargeBinary,
    Select,
    cast,
    create_engine,
    event,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as NoSession

from controlplane import dependencies
from controlplane.db import server_silence
from controlplane.db.database_fault_policy import DatabaseFault, fault_of_result, fault_of_sqlstate
from controlplane.db.ledger_migrations import ensure_ledger
from controlplane.db.migrations import migrate
from controlplane.db.postgres_url import PostgresUrl
from kelvin.contracts.errors import CapacityExceeded, Conflict, Failure, Refused, Unavailable

if TYPE_CHECKING:  # its driver is an extra
    from controlplane.db.postgres import Postgres

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_MS: Final = int(dependencies.DATABASE.timeout_s * 1000)
READERS: Final = 2
DAMAGED_RETRY_AFTER_S: Final = 60.0  # Retry-After while the database is damaged, until an operator repairs it
# Raised when a row is read that was changed by hand.
UNREADABLE: Final = (ValueError, TypeError, LookupError, ArithmeticError, DBAPIError)
_READ_ONLY: Final = "kelvin_read_only"


def sqlite_engine(path: Path, busy_ms: int = BUSY_MS) -> Engine:
    """Return an engine for the file (created with mode 0600). Every transaction takes the write lock at its start,
    except those of `snapshot`. It waits up to `busy_ms` for a lock of another process.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # WAL and shm files copy its mode
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _prepare(connection: SqliteConnection, _: object) -> None:
        connection.isolation_level = None  # the driver's implicit BEGIN would leave DDL outside of transactions
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={busy_ms}"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A deferred transaction that reads before it writes would fail instead of waiting: take the lock at once.
        reads = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


@contextmanager
def disposing(engine: Engine) -> Iterator[Engine]:
    """Yield the engine, and close its connections at the end."""
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _refusing_faults() -> Iterator[None]:
    """Translate faults of the database to `Refused`. Any other error is a defect, and is raised unchanged."""
    try:
        yield
    except (NoSession, server_silence.ServerSilent) as error:
        raise Refused(Unavailable("the database")) from error
    except DBAPIError as error:
        failure = failure_of(error)
        if failure is None:
            raise
        match fault_of(error):
            case DatabaseFault.DAMAGED:
                log.error("the database is damaged", exc_info=error)
            case DatabaseFault.REFUSED:
                log.error("the database denies access", exc_info=error)
        raise Refused(failure) from error


def failure_of(error: DBAPIError) -> Failure | None:
    """Return the failure that a caller gets for an error of either database; None for a defect of ours."""
    match fault_of(error):
        case DatabaseFault.DEFECT:
            return None
        case DatabaseFault.FULL:
            return CapacityExceeded("bytes on the disk of the database", 1, 0)
        case DatabaseFault.DAMAGED:
            return Unavailable("the database, whose files are damaged,", DAMAGED_RETRY_AFTER_S)
        case DatabaseFault.REFUSED | DatabaseFault.RETRYABLE | DatabaseFault.UNKNOWN:
            return Unavailable("the database")


def fault_of(error: DBAPIError) -> DatabaseFault:
    """Return the fault of an error of either database."""
    if isinstance(error.orig, sqlite3.Error):
        return fault_of_result(getattr(error.orig, "sqlite_errorcode", 0))  # the driver's own errors have none
    if (code := getattr(error.orig, "sqlstate", None)) is not None:
        return fault_of_sqlstate(code)
    # The client library's own errors have no code: it lost the server, or found none.
    return DatabaseFault.UNKNOWN if isinstance(error, OperationalError) else DatabaseFault.DEFECT


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """Yield a connection that reads one consistent state."""
    with engine.connect().execution_options(**{_READ_ONLY: True}) as connection:
        yield connection


def stream_rows(connection: Connection, query: Select[*tuple[Any, ...]], rows: int) -> Iterator[Any]:
    """Yield the rows of a query, fetched `rows` at a time. Close the iterator if you stop before its end.

    Raises DBAPIError at a row with a text that is no UTF-8, after all rows before it. SQLite fails the whole fetch that
    contains such a row, so the rest is fetched one by one.
    """
    count = 0
    try:
        with connection.execute(query.execution_options(yield_per=rows)) as found:
            for row in found:
                yield row
                count += 1
    except DBAPIError as error:
        if rows == 1 or connection.dialect.name != "sqlite" or failure_of(error) is not None:
            raise
        yield from stream_rows(connection, query.offset(count), 1)


def check_row_types(query: Select[*tuple[Any, ...]], rows: Iterable[Any]) -> Iterator[Any]:
    """Yield the query's rows. Raises TypeError for a value of another type: SQLite keeps any value in any column."""
    columns = tuple(query.selected_columns)
    kinds = tuple((column.type.python_type, NoneType) for column in columns)
    for row in rows:
        if not all(map(isinstance, row, kinds)):
            wrong = next(place for place, value in enumerate(row) if not isinstance(value, kinds[place]))
            raise TypeError(f"{columns[wrong].key or 'a figure'} is {repr(row[wrong])[:80]}")
        yield row


def distinct_texts(connection: Connection, column: ColumnElement[str]) -> list[str]:
    """Return the distinct texts of a column, sorted.

    In SQLite such a column may hold bytes that are no UTF-8. These are escaped.
    """
    if connection.dialect.name != "sqlite":
        return sorted(set(connection.execute(select(column)).scalars()))
    found = connection.execute(select(cast(column, LargeBinary))).scalars()
    return sorted({text.decode(errors="backslashreplace") for text in found})


def unreadable(error: Exception) -> str:
    """Return a text about the row that raised one of UNREADABLE.

    Raises the error itself if the database is away or damaged, since then it says nothing about the row.
    """
    if not isinstance(error, DBAPIError):
        return f"one can't be read: {error}"
    if failure_of(error) is not None:
        raise error
    return f"one can't be read: {error.orig}"


@contextmanager
def refuse_unreadable(what: str, command: str) -> Iterator[None]:
    """Raise Refused(Conflict) if the block reads a row of `what` that can't be read.

    The message tells the user to run `command`, which names the row.
    """
    try:
        yield
    except UNREADABLE as error:
        rule = f"of its rows {unreadable(error)}. `{command}` names the row"
        log.error("rows can't be read", exc_info=error, extra={"of": what})
        raise Refused(Conflict(what, rule)) from error


class Database:
    """Owns the engine and its threads. Constructing it migrates database and ledger. Close it where you opened it."""

    def __init__(self, engine: Engine, postgres: "Postgres | None" = None) -> None:
        migrate(engine)
        ensure_ledger(engine)
        self.engine = engine
        self.writes = 0  # write transactions; for SQLite only those that changed something
        self.on_fenced: Callable[[], None] = lambda: None  # memory and database differ, so the process has to restart
        self._postgres = postgres
        self._reading = engine if postgres is None else postgres.reading
        self._writer = ThreadPoolExecutor(1, "database-writer")
        self._readers = ThreadPoolExecutor(READERS, "database-reader")

    def __repr__(self) -> str:
        return f"<Database {self._postgres or self.engine.url.database}>"

    async def write(
        self, work: Callable[[Connection], T], *, repeated: bool = False, silence_s: float | None = None
    ) -> T:
        """Run `work` in a transaction of the writer thread; durable on return. Cancelling undoes nothing.

        Raises `Refused(Unavailable)` if the database is away, silent, damaged, or locked for too long by another
        process; `Refused(CapacityExceeded)` if its disk is full. Pass `repeated` for idempotent work that its caller
        repeats until it succeeds. Pass `silence_s` for a statement during which PostgreSQL may be silent for longer.
        """
        queued_at_s = time.monotonic()

        def transaction() -> T:
            with _refusing_faults(), self._limit_silence(silence_s or server_silence.LIMIT_S, queued_at_s):
                return self._commit(work, repeated)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._writer, transaction)
        except Refused:
            if self._postgres is not None and self._postgres.writer.is_fenced:
                self.on_fenced()
            raise

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on one consistent snapshot. Raises as `write`."""
        queued_at_s = time.monotonic()

        def transaction() -> T:
            limit = self._limit_silence(server_silence.LIMIT_S, queued_at_s)
            with _refusing_faults(), limit, snapshot(self._reading) as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._readers, transaction)

    def copy(self, path: Path) -> None:
        """Write one consistent state to a new file (mode 0600), while others read and write. Blocks: it reads
        everything.

        Raises Refused(Conflict) for PostgreSQL, OSError if a disk refuses (ENOSPC if it is full).
        """
        self.check_copied()
        try:
            session = self.engine.raw_connection()
        except (sqlite3.Error, DBAPIError) as error:
            raise OSError(errno.EIO, f"the database can't be copied: {error}") from error
        with closing(session) as source:
            assert isinstance(source.driver_connection, SqliteConnection)
            copy_file(source.driver_connection, path)

    def damage(self) -> str | None:
        """Return the first thing that SQLite's quick check finds wrong, as one line. Blocks: it reads every page."""
        with self.engine.connect() as connection:
            found = str(connection.execute(text("PRAGMA quick_check(1)")).scalar_one())
        return None if found == "ok" else " ".join(found.split())

    def check_copied(self) -> None:
        """Raise Refused(Conflict) if `copy` can't copy this database."""
        if self._postgres is not None:
            rule = "the database is the PostgreSQL of KELVIN_DATABASE: back it up with pg_dump, or with its own archive"
            raise Refused(Conflict("backup", rule))

    def close(self) -> None:
        """Wait for running commits, then close all connections."""
        self._writer.shutdown()
        self._readers.shutdown()
        self.engine.dispose()
        if self._postgres is not None:
            self._postgres.close()

    def _limit_silence(self, limit_s: float, queued_at_s: float) -> AbstractContextManager[None]:
        """Limit how long PostgreSQL may be silent. SQLite limits its own waits."""
        return nullcontext() if self._postgres is None else server_silence.limit_silence(limit_s, queued_at_s)

    def _commit(self, work: Callable[[Connection], T], repeated: bool) -> T:
        if self._postgres is not None:
            done = self._postgres.commit(work, repeated=repeated)
            self.writes += 1
            return done
        with self.engine.begin() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, SqliteConnection)
            before = driver.total_changes
            done = work(connection)
            has_changed = driver.total_changes != before
        self.writes += has_changed
        return done


def copy_file(source: SqliteConnection, path: Path) -> None:
    """Write one consistent state of a SQLite database to a new file (mode 0600). Raises OSError if a disk refuses."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        with closing(sqlite3.connect(path)) as target:
            source.backup(target)  # SQLite's: one step under one read lock, GIL released
    except sqlite3.Error as error:
        if fault_of_result(getattr(error, "sqlite_errorcode", 0)) is DatabaseFault.FULL:
            raise OSError(errno.ENOSPC, "there is no room for a copy of the database", str(path.parent)) from error
        raise OSError(errno.EIO, f"the database can't be copied: {error}") from error


def open_database(place: Path | PostgresUrl) -> Database:
    """Open and migrate the database. Raises DBAPIError if PostgreSQL is away or another control plane writes to it;
    BadSetting; NewerDatabase, NewerLedger.
    """
    with ExitStack() as unless_opened:
        if isinstance(place, Path):
            opened = Database(unless_opened.enter_context(disposing(sqlite_engine(place))))
        else:
            from controlplane.db.postgres import Postgres

            postgres = unless_opened.enter_context(closing(Postgres(place, READERS)))
            opened = Database(postgres.writing, postgres)
        unless_opened.pop_all()
        return opened


def reading_engine(place: Path | PostgresUrl) -> Engine:
    """Return an engine for reading what another process writes. Dispose of it."""
    if isinstance(place, Path):
        return sqlite_engine(place)
    from controlplane.db import postgres

    return postgres.reading_engine(place)
