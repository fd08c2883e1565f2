"""Open the database once it is available: PostgreSQL may start later, or another control plane may still write to it.

Then keep the writing session: a session that was cut has lost the lock, even if nothing has to be written.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from controlplane.clock import Clock
from controlplane.db.database import Database, fault_of, open_database
from controlplane.db.database_fault_policy import DatabaseFault
from controlplane.db.ledger_migrations import NewerLedger
from controlplane.db.migrations import NewerDatabase
from controlplane.db.postgres_url import PostgresUrl
from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting

log = logging.getLogger(__name__)

RETRY_INTERVAL_S: Final = 1.0
CHECK_INTERVAL_S: Final = 5.0
WAS_READY_FILE: Final = "url"  # in the data directory: `kelvin up` writes it when the installation is ready
_MAGIC: Final = b"SQLite format 3\0"
_WAL_MAGIC: Final = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")  # https://www.sqlite.org/fileformat2.html (4.1)
READ_ONLY: Final = "25006"  # PostgreSQL's state of a transaction that may not write


async def open_when_available(
    place: Path | PostgresUrl, stop: asyncio.Event, on_waiting: Callable[[str], None] = lambda _: None
) -> Database | None:
    """Open the database; return None if `stop` is set first. A file is opened at once or not at all. PostgreSQL is
    waited for. A cancelled call leaves nothing open.

    `on_waiting` is called with a text about what is waited for, without host and user. Raises DBAPIError for a defect
    of PostgreSQL or of this program, and BadSetting for a damaged file or a database of a newer program.
    """
    on_waiting("the database")
    if isinstance(place, Path):
        return _open_file(place)
    logged_reason = ""
    while not stop.is_set():
        opening = _PendingOpen(place)
        try:
            return await asyncio.to_thread(opening.run)
        except asyncio.CancelledError:
            opening.abandon()
            raise
        except (NewerDatabase, NewerLedger) as newer:
            rule = f"{newer}: use the newer program again, or restore the database as it was before the upgrade"
            raise BadSetting("KELVIN_DATABASE", str(place), rule) from newer
        except DBAPIError as error:
            if fault_of(error) in (DatabaseFault.DEFECT, DatabaseFault.DAMAGED):
                raise
            why = str(error.orig).strip()
            if why != logged_reason:
                log.warning("the database can't be opened; retrying", extra={"database": str(place), "error": why})
                logged_reason = why
            on_waiting(f"the database: {_reason(error)}")
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_INTERVAL_S):
                await stop.wait()
    return None


def _open_file(path: Path) -> Database:
    """Open a SQLite file. Raises DBAPIError for a defect, and BadSetting if the file or its write-ahead log is damaged,
    or if a newer program has migrated it.
    """
    check_file_headers(path)
    try:
        with translate_damage(path):
            return open_database(path)
    except (NewerDatabase, NewerLedger) as newer:
        back = "restore a backup from before the upgrade (kelvin restore FILE --replace), which lacks later changes"
        rule = f"{newer}: use the newer program again, or {back}"
        raise BadSetting("KELVIN_DATA", str(path.parent), rule) from newer


@contextmanager
def translate_damage(path: Path) -> Iterator[None]:
    """Translate SQLite's errors about a damaged file, or a copy of it, to a BadSetting about `path`."""
    try:
        yield
    except DBAPIError as error:
        if fault_of(error) is not DatabaseFault.DAMAGED:
            raise
        raise _damaged(path, f"{path.name} is damaged ({error.orig})") from error


def check_pages(copy: Database, path: Path) -> None:
    """Read every page of a copy of the file at `path`. Raises BadSetting if one is damaged."""
    if (found := copy.damage()) is not None:
        raise _damaged(path, f"{path.name} is damaged ({found})")


def check_file_headers(path: Path) -> None:
    """Refuse files that SQLite would silently replace: an emptied or lost database, a write-ahead log with a damaged
    header, a database whose whole content was in a lost log. For a damaged file SQLite would delete the log, which may
    be needed to repair it.
    """
    log_path = path.with_name(f"{path.name}-wal")
    begins, log_begins = _try_read_header(path), _try_read_header(log_path)
    if log_begins and log_begins[:4] not in _WAL_MAGIC:
        rest = f"or remove it, which loses the last commits that are not in {path.name} yet"
        raise _damaged(path, f"{log_path.name} is damaged", rest)
    if begins and begins != _MAGIC:
        raise _damaged(path, f"{path.name} is damaged (file is not a database)")
    if log_begins and not begins:
        raise _damaged(path, f"{path.name} is empty or missing, but its {log_path.name} exists")
    # A new installation has no file, and a start that was killed early leaves an empty one. Neither was ever ready.
    # After a loss, a new database would be backed up, and the next restore would take that backup as the newest.
    if not (path.parent / WAS_READY_FILE).exists():
        return
    if not begins:
        rest = f"or remove `{WAS_READY_FILE}` and `{path.name}` to begin without models, keys and bills"
        raise _damaged(path, f"{path.name} is {'missing' if begins is None else 'empty'}", rest)
    # In the first minute, all but a header is in the log. Keys are created before a start is ready, and never deleted.
    if not _has_keys(path):
        what = f"{path.name} has no keys, as its {log_path.name} is empty, missing or cut short"
        rest = (
            f"or remove `{WAS_READY_FILE}`, `{path.name}` and `{log_path.name}` to begin without models, keys and bills"
        )
        raise _damaged(path, what, rest)


def _has_keys(path: Path) -> bool:
    """Return False only if the database is readable and has no key. Changes neither the file nor its log."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            return bool(connection.execute("SELECT EXISTS (SELECT 1 FROM keys)").fetchone()[0])
        except sqlite3.Error as error:
            return error.sqlite_errorcode != sqlite3.SQLITE_ERROR  # SQLITE_ERROR: there is no such table


def _try_read_header(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC))
    except FileNotFoundError:
        return None


def _damaged(path: Path, what: str, otherwise: str = "") -> BadSetting:
    to_do = f"restore a backup (kelvin restore) {otherwise}".strip()
    return BadSetting("KELVIN_DATA", str(path.parent), f"{what}: {to_do}")


def _reason(error: DBAPIError) -> str:
    from controlplane.db.postgres import WriterLockHeld  # its driver is an extra

    if isinstance(error.orig, WriterLockHeld):
        return "another control plane writes to it"
    if getattr(error.orig, "sqlstate", None) == READ_ONLY:
        return "its server is read-only, as a standby is"
    match fault_of(error):
        case DatabaseFault.REFUSED:
            return "it denies access, the log says why"
        case DatabaseFault.FULL:
            return "its disk is full"
        case _:
            return "it can't be reached, the log says why"


class _PendingOpen:
    """Opens PostgreSQL in a thread that goes on after its caller has left.

    A control plane that lost the lead can't wait until a migration ends. So a database that is open by then is closed
    at once, or its session would keep the lock from the next leader.
    """

    def __init__(self, place: PostgresUrl) -> None:
        self._place = place
        self._lock = Lock()
        self._database: Database | None = None
        self._is_abandoned = False

    def run(self) -> Database:
        """Open the database. Blocking. Raises as `open_database`."""
        opened = open_database(self._place)
        with self._lock:
            self._database, is_left = opened, self._is_abandoned
        if is_left:
            opened.close()
        return opened

    def abandon(self) -> None:
        """Close the database, now or once it is open, because the caller has left."""
        with self._lock:
            opened, self._is_abandoned = self._database, True
        if opened is not None:
            opened.close()


async def watch_write_session(database: Database, clock: Clock) -> None:
    """Check the writing session at an interval, until cancelled.

    So a session that was cut is soon replaced and takes the lock again, and a fenced control plane learns of it.
    """
    is_away = False
    while True:
        await clock.sleep(CHECK_INTERVAL_S)
        was_away = is_away
        try:
            await database.write(_do_nothing, repeated=True)
            is_away = False
        except Refused:
            is_away = True
        if is_away is not was_away:
            log.warning("the database is away" if is_away else "the database is back")


def _do_nothing(connection: Connection) -> None:
    """Run an empty transaction."""
