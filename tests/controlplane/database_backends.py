"""The two databases that the stores' suites run on. A path names one, however often it is asked for.

A test that uses the fixture `backend` runs on each; `database` opens that one, and elsewhere SQLite's file.
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
    """A file as the program leaves it when it has started: the steps to there are taken once for all tests."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "kelvin.db")
        open_database(path).close()
        return path.read_bytes()


def _file(directory: Path, *, migrated: bool = True) -> Path:
    """Of SQLite there; a new one is migrated, or not made."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "kelvin.db"
    with suppress(FileExistsError):
        if migrated:
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(_migrated())
    return path


class DatabaseBackend:
    """SQLite's files; or databases of a server, gone with the test."""

    def __init__(self, server: PostgresServer | None, stack: ExitStack) -> None:
        self._server = server
        self._stack = stack
        self._places: dict[Path, PostgresUrl] = {}

    @property
    def name(self) -> str:
        """The name of its dialect in SQLAlchemy."""
        return SQLITE if self._server is None else POSTGRESQL

    def place(self, path: Path, *, migrated: bool = True) -> Path | PostgresUrl:
        """Return the test's database of that path, as settings name it."""
        if self._server is None:
            return _file(path, migrated=migrated)
        if path not in self._places:
            self._places[path] = place = self._server.database(migrated=migrated)
            self._stack.callback(self._server.drop, place)
        return self._places[path]

    def database(self, path: Path) -> Database:
        """Open the test's database of that path. Close it."""
        return open_database(self.place(path))

    def engine(self, path: Path, *, migrated: bool = False) -> Engine:
        """Return an engine that writes, on an empty database unless `migrated`. It is closed with the test."""
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
    """The test's database of that path, migrated. Close it."""
    return _active_backends[-1].database(path) if _active_backends else open_database(_file(path))


def place(path: Path) -> Path | PostgresUrl:
    """Return the test's database of that path, as settings name it."""
    return _active_backends[-1].place(path) if _active_backends else _file(path)


@contextmanager
def backends(name: str, server: Callable[[], PostgresServer]) -> Iterator[DatabaseBackend]:
    """Have this module's functions use that back end while the block runs. `server` is called if it is needed."""
    with ExitStack() as stack:
        _active_backends.append(DatabaseBackend(None if name == SQLITE else server(), stack))
        stack.callback(_active_backends.pop)
        yield _active_backends[-1]
