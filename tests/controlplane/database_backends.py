"""Provide the two databases that the stores' tests run on. One path always names the same database.

A test with the fixture `backend` runs on both; `database` then opens that backend's. Elsewhere it opens an SQLite file.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sqlalchemy import Engine

from controlplane.db.database import Database, open_database, sqlite_engine
from controlplane.db.postgres import Postgres
from controlplane.db.postgres_url import PostgresUrl
from tests.controlplane.postgres_server import PostgresServer

SQLITE, POSTGRESQL = "sqlite", "postgresql"


@functools.cache
def _migrated() -> bytes:
    """Return the content of a migrated database file. All migrations run once for all tests."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "kelvin.db")
        open_database(path).close()
        return path.read_bytes()


def _file(directory: Path, *, migrated: bool = True) -> Path:
    """Return the SQLite file in `directory`. A new one is migrated; without `migrated` only its path is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "kelvin.db"
    with suppress(FileExistsError):
        if migrated:
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(_migrated())
    return path


class DatabaseBackend:
    """SQLite files, or databases of a PostgreSQL server that are dropped after the test."""

    def __init__(self, server: PostgresServer | None, stack: ExitStack) -> None:
        self._server = server
        self._stack = stack
        self._places: dict[Path, PostgresUrl] = {}

    @property
    def name(self) -> str:
        """The name of its SQLAlchemy dialect."""
        return SQLITE if self._server is None else POSTGRESQL

    def place(self, path: Path, *, migrated: bool = True) -> Path | PostgresUrl:
        """Return the location of the test's database for `path`, in the form that settings use."""
        if self._server is None:
            return _file(path, migrated=migrated)
        if path not in self._places:
            self._places[path] = place = self._server.database(migrated=migrated)
            self._stack.callback(self._server.drop, place)
        return self._places[path]

    def database(self, path: Path) -> Database:
        """Open the test's database for `path`. The caller closes it."""
        return open_database(self.place(path))

    def engine(self, path: Path, *, migrated: bool = False) -> Engine:
        """Return an engine that can write. Its database is empty unless `migrated`. It is closed after the test."""
        place = self.place(path, migrated=migrated)
        if isinstance(place, Path):
            engine = sqlite_engine(place)
            self._stack.callback(engine.dispose)
            return engine
        postgres = Postgres(place, 1)
        self._stack.callback(postgres.close)
        return postgres.writing


_active_backends: list[DatabaseBackend] = []


def database(path: Path) -> Database:
    """Open the test's database for `path`, migrated. The caller closes it."""
    return _active_backends[-1].database(path) if _active_backends else open_database(_file(path))


def place(path: Path) -> Path | PostgresUrl:
    """Return the location of the test's database for `path`, in the form that settings use."""
    return _active_backends[-1].place(path) if _active_backends else _file(path)


@contextmanager
def backends(name: str, server: Callable[[], PostgresServer]) -> Iterator[DatabaseBackend]:
    """Make this module's functions use that backend inside the block. `server` is called only if it is needed."""
    with ExitStack() as stack:
        _active_backends.append(DatabaseBackend(None if name == SQLITE else server(), stack))
        stack.callback(_active_backends.pop)
        yield _active_backends[-1]
