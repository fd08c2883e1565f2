"""SQLite databases of a simulation: migrated once, with one cache of compiled statements per process."""

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sqlalchemy import Engine, create_engine

from controlplane.db.database import Database, open_database


@functools.cache
def migrated() -> bytes:
    """Return the content of a database after a control plane's first start."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kelvin.db")
        open_database(path).close()
        return path.read_bytes()


@functools.cache
def _first() -> Engine:
    return create_engine("sqlite://")


def _create_engine(*given: Any, **more: Any) -> Engine:
    """Create an engine that shares compiled statements. Compiling a statement costs more than running it."""
    engine: Any = create_engine(*given, **more)
    engine.dialect, engine._compiled_cache = _first().dialect, _first()._compiled_cache
    return engine  # type: ignore[no-any-return]


@contextmanager
def shared_statements() -> Iterator[None]:
    """Let engines that are created in the block share compiled statements."""
    with mock.patch("controlplane.db.database.create_engine", _create_engine):
        yield


def opened(path: Path) -> Database:
    """Open the database like `open_database`, with shared statements."""
    with shared_statements():
        return open_database(path)
