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

from controlplane.postgres import Postgres
from controlplane.postgres_place import PostgresPlace
from controlplane.store import Database, open_database, sqlite_engine
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


class Backend:
    """SQLite's files; or databases of a server, gone with the test."""

    def __init__(self, server: PostgresServer | None, ladder: ExitStack) -> None:
        self._server = server
        self._ladder = ladder
        self._places: dict[Path, PostgresPlace] = {}

    @property
    def name(self) -> str:
        """As SQLAlchemy has it."""
        return SQLITE if self._server is None else POSTGRESQL

    def place(self, path: Path, *, migrated: bool = True) -> Path | PostgresPlace:
        """As settings have it."""
        if self._server is None:
            return _file(path, migrated=migrated)
        if path not in self._places:
            self._places[path] = place = self._server.database(migrated=migrated)
            self._ladder.callback(self._server.drop, place)
        return self._places[path]

    def database(self, path: Path) -> Database:
        """Close it."""
        return open_database(self.place(path))

    def engine(self, path: Path, *, migrated: bool = False) -> Engine:
        """One that writes; closed with the test. Nothing was migrated, unless it is wished."""
        place = self.place(path, migrated=migrated)
        if isinstance(place, Path):
            engine = sqlite_engine(place)
            self._ladder.callback(engine.dispose)
            return engine
        postgres = Postgres(place, 1)
        self._ladder.callback(postgres.close)
        return postgres.writing


_chosen: list[Backend] = []


def database(path: Path) -> Database:
    """The test's database of that path, migrated. Close it."""
    return _chosen[-1].database(path) if _chosen else open_database(_file(path))


def place(path: Path) -> Path | PostgresPlace:
    """Likewise, as settings have it."""
    return _chosen[-1].place(path) if _chosen else _file(path)


@contextmanager
def backends(name: str, server: Callable[[], PostgresServer]) -> Iterator[Backend]:
    """By name; the server is asked for where it is needed."""
    with ExitStack() as ladder:
        _chosen.append(Backend(None if name == SQLITE else server(), ladder))
        ladder.callback(_chosen.pop)
        yield _chosen[-1]
