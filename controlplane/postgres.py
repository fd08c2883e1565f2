"""PostgreSQL as the control plane's database: how it is reached, and that one control plane at a time writes to it.

Whoever writes holds an advisory lock in the session that it writes in: with that session both are gone, the lock and
what was not committed. What another control plane wrote meanwhile shows in the number that each takes at its start.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg
from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from contracts.settings import BadSetting
from controlplane import dependencies
from controlplane.postgres_place import PostgresPlace
from service.listener import ASK_AGAIN_S, ASK_TIMES, QUIET_S

log = logging.getLogger(__name__)

T = TypeVar("T")

OLDEST: Final = 150_000  # as libpq numbers versions: 15, the oldest that the suite runs with
LOCK: Final = int.from_bytes(b"kelvin", "big")  # an advisory lock is of one database
_WAIT_MS: Final = int(dependencies.DATABASE.timeout_s * 1000)
_STATEMENT_MS: Final = int(dependencies.STATEMENT_S * 1000)
_SESSION: Final = (
    "default_transaction_isolation=repeatable\\ read",  # whoever reads twice sees one state
    "synchronous_commit=on",
    f"lock_timeout={_WAIT_MS}",
    f"statement_timeout={_STATEMENT_MS}",
    f"idle_in_transaction_session_timeout={_STATEMENT_MS}",
    # The server's own: a machine of ours that is gone holds the lock no longer than connections between hosts last.
    f"tcp_keepalives_idle={QUIET_S}",
    f"tcp_keepalives_interval={ASK_AGAIN_S}",
    f"tcp_keepalives_count={ASK_TIMES}",
)
_READ_ONLY: Final = "default_transaction_read_only=on"
_TRANSACTION: Final = text("SELECT CAST(pg_current_xact_id_if_assigned() AS TEXT)")
_OUTCOME: Final = "SELECT pg_xact_status(CAST(%s AS xid8))"


class Held(psycopg.OperationalError):
    """Another control plane writes to this database."""


class Superseded(psycopg.OperationalError):
    """The database holds what this process does not know of: it has to begin anew."""


class Writer:
    """One control plane as the database knows it: by a number above that of all before it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.superseded = False
        self._unsure: set[str] = set()  # transactions whose commit was not answered

    def hold(self, connection: "psycopg.Connection[Any]") -> None:
        """Take the lock in this session; it is let go with it. Raises Held, Superseded."""
        try:
            connection.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        except LockNotAvailable:
            raise Held("another control plane writes to this database") from None
        connection.commit()  # a transaction sees what there was when it began, which was before the wait
        if self.number is None:
            connection.execute("CREATE TABLE IF NOT EXISTS writers (number BIGINT NOT NULL PRIMARY KEY)")
            began = "INSERT INTO writers SELECT COALESCE(MAX(number), 0) + 1 FROM writers RETURNING number"
            self.number = _one(connection, began)
        elif _one(connection, "SELECT MAX(number) FROM writers") != self.number:
            self._end("another control plane has written to this database")
        for transaction in tuple(self._unsure):
            if self.has_committed(connection, transaction):
                self._end("a change of which nobody was told has been committed")
            self._unsure.discard(transaction)
        connection.commit()

    def has_committed(self, connection: "psycopg.Connection[Any]", transaction: str) -> bool:
        """Whether that transaction is in the database. After its session has ended it can't be under way."""
        return bool(_one(connection, _OUTCOME, transaction) == "committed")

    def is_unsure_of(self, transaction: str) -> None:
        """Whether it was committed could not be learned; what is in memory may be behind."""
        self._unsure.add(transaction)

    def _end(self, why: str) -> None:
        self.superseded = True
        raise Superseded(why)


class Postgres:
    """Two engines over one database: a session that writes, and some that read. Close it where you opened it."""

    def __init__(self, place: PostgresPlace, readers: int) -> None:
        """Connects. Raises OperationalError where it can't, or where another writes; BadSetting for what won't do."""
        self.place = place
        self.writer = Writer()
        self.writing = _engine(place, 1, lambda: _connect(place, *_SESSION), self.writer.hold)
        self.reading = _engine(place, readers, lambda: _connect(place, *_SESSION, _READ_ONLY))
        try:
            with self.writing.connect() as connection:
                _check(connection.connection.driver_connection)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Postgres {self.place} writer={self.writer.number}>"

    def commit(self, work: Callable[[Connection], T], *, repeated: bool) -> T:
        """Run `work` in a transaction of the session that writes; a lost answer to its commit is asked for once more.

        Raises OperationalError where the database is away; then it was most likely not committed. Where it was after
        all, and `work` is not one that is `repeated` until it is answered, the writer is superseded.
        """
        with self.writing.connect() as connection:
            transaction = connection.begin()
            try:
                done = work(connection)
                name = connection.execute(_TRANSACTION).scalar_one()
            except BaseException:
                transaction.rollback()
                raise
            try:
                transaction.commit()
            except OperationalError as error:
                if name is None or not error.connection_invalidated:
                    raise
                lost = error
            else:
                return done
        if not self._was_committed(name, repeated):
            raise lost
        return done

    def close(self) -> None:
        """With its sessions the lock is gone."""
        self.writing.dispose()
        self.reading.dispose()

    def _was_committed(self, name: str, repeated: bool) -> bool:
        """In a session of its own: where the lock is ours again, the one that was lost has ended."""
        try:
            with self.writing.connect() as connection:
                driver = connection.connection.driver_connection
                assert driver is not None
                return self.writer.has_committed(driver, name)
        except OperationalError:
            if not repeated:
                self.writer.is_unsure_of(name)
            return False


def reading_engine(place: PostgresPlace) -> Engine:
    """To read one consistent state, in a process of its own."""
    return _engine(place, 1, lambda: _connect(place, *_SESSION, _READ_ONLY))


def _engine(
    place: PostgresPlace,
    sessions: int,
    connect: Callable[[], "psycopg.Connection[Any]"],
    begin: Callable[["psycopg.Connection[Any]"], None] = lambda connection: None,
) -> Engine:
    def connected() -> "psycopg.Connection[Any]":
        connection = connect()
        try:
            begin(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    return create_engine(
        "postgresql+psycopg://",
        creator=connected,
        paramstyle="format",  # rows of the ledger go to the driver as they are
        use_native_hstore=False,  # it would ask each new session for a type that nobody uses
        pool_pre_ping=True,
        pool_size=sessions,
        max_overflow=0,
        pool_timeout=dependencies.DATABASE.timeout_s,
    )


def _connect(place: PostgresPlace, *session: str) -> "psycopg.Connection[Any]":
    """Raises psycopg.OperationalError, also where the file with the password can't be read."""
    try:
        password = place.password()
    except OSError as error:
        raise psycopg.OperationalError(f"the file with its password can't be read: {error.strerror}") from None
    given = {} if password is None else {"password": password}
    return psycopg.connect(
        place.url,
        options=" ".join(f"-c {each}" for each in session),
        application_name="kelvin",
        client_encoding="utf8",
        connect_timeout=int(dependencies.DATABASE.timeout_s),
        tcp_user_timeout=_WAIT_MS,
        **given,  # type: ignore[arg-type]
    )


def _check(connection: "psycopg.Connection[Any] | None") -> None:
    assert connection is not None
    shown, told = "postgresql://...", connection.info
    if told.server_version < OLDEST:
        raise BadSetting("KELVIN_DATABASE", shown, f"its server must be {OLDEST // 10_000} or later")
    encoding = told.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise BadSetting("KELVIN_DATABASE", shown, f"its encoding is {encoding}; make it with ENCODING 'UTF8'")


def _one(connection: "psycopg.Connection[Any]", query: str, *values: object) -> Any:
    row = connection.execute(query, values).fetchone()
    assert row is not None
    return row[0]
