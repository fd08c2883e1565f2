"""Use PostgreSQL as the control plane's database, and ensure that one control plane at a time writes to it.

The writer holds an advisory lock in the session in which it writes. If that session ends, the lock and all uncommitted
changes are gone together. Each control plane takes a number at its start, so a higher number shows that another one
wrote meanwhile.

Each writing transaction also increments a commit count in the row of that number. A new session compares the count with
the one in memory. So it learns whether a commit without an answer took place, and whether the server has lost
acknowledged commits: after a failover to a standby that lagged, or a restore of the database.
"""

import logging
import math
import secrets
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg.errors import ConnectionTimeout, LockNotAvailable, UndefinedColumn, UndefinedTable
from psycopg.waiting import Ready
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from controlplane import dependencies
from controlplane.db import server_silence
from controlplane.db.database_fault_policy import DatabaseFault, fault_of_sqlstate
from controlplane.db.postgres_url import PostgresUrl
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.tcp_listener import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES

log = logging.getLogger(__name__)

T = TypeVar("T")

MIN_SERVER_VERSION: Final = 150_000  # as libpq numbers versions: 15, the oldest that the suite runs with
LOCK: Final = int.from_bytes(b"kelvin", "big")  # the scope of an advisory lock is one database
_WAIT_MS: Final = int(dependencies.DATABASE.timeout_s * 1000)
_LOCK_MS: Final = 3000  # less than the silence after which the client gives up, so that the server can say why
_STATEMENT_MS: Final = int(dependencies.STATEMENT_S * 1000)
_SESSION: Final = (
    "default_transaction_isolation=repeatable\\ read",  # two reads in one transaction see the same state
    "synchronous_commit=on",
    f"lock_timeout={_LOCK_MS}",
    f"statement_timeout={_STATEMENT_MS}",
    f"idle_in_transaction_session_timeout={_STATEMENT_MS}",
    # The server's keepalives: if our machine is gone, its session and the lock end as soon as any connection to it.
    f"tcp_keepalives_idle={KEEPALIVE_IDLE_S}",
    f"tcp_keepalives_interval={KEEPALIVE_INTERVAL_S}",
    f"tcp_keepalives_count={KEEPALIVE_PROBES}",
)
_READ_ONLY: Final = "default_transaction_read_only=on"
_WRITERS: Final = (
    "CREATE TABLE IF NOT EXISTS writers (number BIGINT NOT NULL PRIMARY KEY)",
    # After a failover that lost rows, their numbers are given again. The token tells the writers apart.
    "ALTER TABLE writers ADD COLUMN IF NOT EXISTS token BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE writers ADD COLUMN IF NOT EXISTS commits BIGINT NOT NULL DEFAULT 0",
)
_BEGIN: Final = (
    "INSERT INTO writers (number, token) SELECT COALESCE(MAX(number), 0) + 1, %s FROM writers RETURNING number"
)
_NEWEST: Final = "SELECT number, token, commits FROM writers ORDER BY number DESC LIMIT 1"
# A transaction that has written has an id by now. Others have none, and for them this writes nothing.
_COUNT: Final = text(
    "UPDATE writers SET commits = commits + 1 "
    "WHERE number = :number AND pg_current_xact_id_if_assigned() IS NOT NULL RETURNING commits"
)
LOST_COMMITS: Final = "the database has lost what it had committed: a failover to a standby that lagged, or a restore"


class WriterLockHeld(psycopg.OperationalError):
    """Another control plane writes to this database."""


class WriterFenced(psycopg.OperationalError):
    """The database and this process's memory differ, so the process has to restart."""


class Writer:
    """This control plane's identity in the database: a number above all earlier ones, and a random token."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.commits = 0  # transactions known to be committed
        self.is_fenced = False
        self._token = secrets.randbits(62)
        self._has_unanswered_commit = False  # one more commit was sent and got no answer
        self._may_lack_changes = False  # if that commit took place, memory lacks its changes

    def acquire_lock(self, connection: "psycopg.Connection[Any]") -> None:
        """Take the lock, which this session holds until it ends. Raises WriterLockHeld, WriterFenced."""
        try:
            connection.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        except LockNotAvailable:
            raise WriterLockHeld("another control plane writes to this database") from None
        connection.commit()  # this transaction began before the wait, so it would not see writes made meanwhile
        if self.number is None:
            for statement in _WRITERS:
                connection.execute(statement)
            row = connection.execute(_BEGIN, (self._token,)).fetchone()
            connection.commit()
            assert row is not None
            self.number = row[0]
        else:
            try:
                newest = connection.execute(_NEWEST).fetchone()
            except (UndefinedTable, UndefinedColumn):  # older than this program's first start, or another database
                newest = None
            self._compare(newest)
            connection.commit()

    def record_commit(self) -> None:
        """Record an acknowledged commit."""
        self.commits += 1

    def record_unanswered_commit(self, *, may_lack_changes: bool) -> None:
        """Record that it is unknown whether one more transaction was committed.

        `may_lack_changes`: its caller has gone and will not repeat it. If it was committed, memory lacks its changes.
        """
        self._has_unanswered_commit, self._may_lack_changes = True, may_lack_changes

    def _compare(self, newest: tuple[Any, ...] | None) -> None:
        """Compare the newest writer in the database with this one. Raises WriterFenced. The session holds the lock, so
        no earlier session of ours is still active.

        (1) Another control plane wrote.
        (2) The commit without an answer took place.
        (3) The server lacks acknowledged commits, or has others.
        """
        number, token, commits = newest or (0, 0, 0)
        # (1)
        if self.is_fenced or (self.number is not None and number > self.number):
            self._fence("another control plane has written to this database")
        # (2)
        if self._has_unanswered_commit and token == self._token and commits == self.commits + 1:
            if self._may_lack_changes:
                self._fence("a change whose caller got an error was committed after all")
            self.commits = commits
        # (3)
        if (number, token, commits) != (self.number, self._token, self.commits):
            self._fence(LOST_COMMITS)
        self._has_unanswered_commit = self._may_lack_changes = False

    def _fence(self, why: str) -> None:
        if not self.is_fenced:
            log.error("this control plane ends, so that its successor reads the database again", extra={"why": why})
        self.is_fenced = True
        raise WriterFenced(why)


class _Session(psycopg.Connection[Any]):
    """A session that is closed if the server is silent for longer than the thread's limit: see `server_silence.py`."""

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Wait for the server. If it is silent for too long, close the session and raise OperationalError."""
        try:
            return super().wait(_checking_silence(gen), *arguments, **options)
        except server_silence.ServerSilent as error:
            with suppress(Exception):  # a server that still works releases its locks sooner
                self.cancel_safe(timeout=server_silence.CANCEL_S)
            self.close()
            raise psycopg.OperationalError(str(error)) from None


def _checking_silence(gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Wrap psycopg's generator. Its driver sends it the socket's readiness at least ten times a second."""
    server_silence.start_silence()
    try:
        request = next(gen)
        while True:
            ready = yield request
            if ready & Ready.R:
                server_silence.record_answer()
            server_silence.check()
            request = gen.send(ready)
    except StopIteration as done:
        return done.value


class Postgres:
    """Two engines for one database: one session that writes, and some that read. Close it where you opened it."""

    def __init__(self, place: PostgresUrl, readers: int) -> None:
        """Connect. Raises DBAPIError if that fails or another control plane writes; BadSetting for a wrong server."""
        self.place = place
        self.writer = Writer()
        self.writing = _engine(place, 1, lambda: _connect(place, *_SESSION), self.writer.acquire_lock)
        self.reading = _engine(place, readers, lambda: _connect(place, *_SESSION, _READ_ONLY))
        try:
            with self.writing.connect() as connection:
                _check_server(connection.connection.driver_connection)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Postgres {self.place} writer={self.writer.number}>"

    def commit(self, work: Callable[[Connection], T], *, repeated: bool) -> T:
        """Run `work` in a transaction of the writing session. If the commit gets no answer, ask the server once.

        Raises DBAPIError: most likely nothing was committed. If it was after all, and the caller does not repeat `work`
        until it succeeds (`repeated`), the writer is fenced.
        """
        with self.writing.connect() as connection:
            transaction = connection.begin()
            try:
                done = work(connection)
                has_written = connection.execute(_COUNT, {"number": self.writer.number}).scalar() is not None
            except BaseException:
                transaction.rollback()
                raise
            try:
                transaction.commit()
            except DBAPIError as error:
                if not has_written or not (error.connection_invalidated or _is_outcome_unknown(error)):
                    raise
                connection.invalidate()
                lost = error
            else:
                if has_written:
                    self.writer.record_commit()
                return done
        if not self._was_committed(repeated):
            raise lost
        return done

    def close(self) -> None:
        """Close all sessions. That releases the lock."""
        self.writing.dispose()
        self.reading.dispose()

    def _was_committed(self, repeated: bool) -> bool:
        """Ask in a new session whether the commit took place. Once it has the lock, the lost session has ended."""
        before = self.writer.commits
        self.writer.record_unanswered_commit(may_lack_changes=False)
        try:
            self.writing.connect().close()
        except (DBAPIError, server_silence.ServerSilent):
            if self.writer.commits == before:
                self.writer.record_unanswered_commit(may_lack_changes=not repeated)
        return self.writer.commits > before


def reading_engine(place: PostgresUrl) -> Engine:
    """Return an engine that reads one consistent state, for a process of its own."""
    return _engine(place, 1, lambda: _connect(place, *_SESSION, _READ_ONLY))


def _engine(
    place: PostgresUrl,
    sessions: int,
    connect: Callable[[], "psycopg.Connection[Any]"],
    begin: Callable[["psycopg.Connection[Any]"], None] = lambda connection: None,
) -> Engine:
    def connected() -> "psycopg.Connection[Any]":
        connection = connect()
        try:
            with server_silence.limit_silence(server_silence.LIMIT_S):
                begin(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    return create_engine(
        "postgresql+psycopg://",
        creator=connected,
        paramstyle="format",  # rows of the ledger go to the driver as they are
        use_native_hstore=False,  # it would query each new session for a type that Kelvin does not use
        pool_pre_ping=True,
        pool_size=sessions,
        max_overflow=0,
        pool_timeout=dependencies.DATABASE.timeout_s,
    )


def _connect(place: PostgresUrl, *session: str) -> "psycopg.Connection[Any]":
    """Open a session. Raises psycopg.OperationalError, also if the password file can't be read."""
    try:
        password = place.password()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise psycopg.OperationalError(f"the file with its password can't be read: {why}") from None
    credentials = {} if password is None else {"password": password}
    server_silence.start_silence()
    try:
        server_silence.check()
        left_s = min(server_silence.remaining_s(), dependencies.DATABASE.timeout_s)
        connection = _Session.connect(
            place.url,
            options=" ".join(f"-c {each}" for each in session),
            application_name="kelvin",
            client_encoding="utf8",
            connect_timeout=math.ceil(left_s / place.hosts()),  # libpq applies it to each host
            tcp_user_timeout=_WAIT_MS,
            **credentials,  # type: ignore[arg-type]
        )
    except ConnectionTimeout:
        server_silence.give_up()
        raise
    except server_silence.ServerSilent as error:
        raise psycopg.OperationalError(str(error)) from None
    server_silence.record_answer()
    return connection


def _check_server(connection: "psycopg.Connection[Any] | None") -> None:
    assert connection is not None
    shown, server = "postgresql://...", connection.info
    if server.server_version < MIN_SERVER_VERSION:
        raise BadSetting("KELVIN_DATABASE", shown, f"its server must be {MIN_SERVER_VERSION // 10_000} or later")
    encoding = server.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise BadSetting("KELVIN_DATABASE", shown, f"its encoding is {encoding}; create it with ENCODING 'UTF8'")


def _is_outcome_unknown(error: DBAPIError) -> bool:
    code = getattr(error.orig, "sqlstate", None)
    return code is not None and fault_of_sqlstate(code) is DatabaseFault.UNKNOWN
