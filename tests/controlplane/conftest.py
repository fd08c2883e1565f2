"""Fixtures: a run directory with a fake zygote, and the databases that the stores run on."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine

import controlplane.db.postgres
import controlplane.db.server_silence
from controlplane.db.postgres_url import PostgresUrl
from controlplane.ledger.usage_ledger import Ledger
from tests.controlplane.billing_fixture import ledger_and_registry_engine
from tests.controlplane.builders import World
from tests.controlplane.database_backends import POSTGRESQL, SQLITE, DatabaseBackend, backends
from tests.controlplane.machine_fixture import RunDirectory, fake_zygote
from tests.controlplane.postgres_server import PostgresServer, session_with_lock_timeout


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    where = RunDirectory(tmp_path / "run")
    with fake_zygote(where):
        yield where


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """The data directory of a whole control plane, with a fake zygote in its run directory."""
    where = tmp_path / "data"
    with fake_zygote(RunDirectory(where / "run")):
        yield where


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL of this pytest worker. Starting one is faster than sharing one between workers.

    On a busy machine, a closed session may hold its lock for a while, so the next session waits longer for locks.
    """
    with PostgresServer() as made, pytest.MonkeyPatch.context() as patched:
        patched.setattr(controlplane.db.postgres, "_SESSION", session_with_lock_timeout("60s"))
        patched.setattr(controlplane.db.server_silence, "LIMIT_S", 90.0)
        yield made


@pytest.fixture
def postgres(server: PostgresServer) -> Iterator[PostgresServer]:
    """The worker's PostgreSQL. It runs again after the test, even if the test killed or stalled it."""
    yield server
    if not server.runs:
        server.start()
    server.stall(resumed=True)
    server.promote()


@pytest.fixture
def place(postgres: PostgresServer) -> Iterator[PostgresUrl]:
    """A migrated database of this test alone."""
    made = postgres.database()
    yield made
    postgres.drop(made)


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def backend(request: pytest.FixtureRequest) -> Iterator[DatabaseBackend]:
    """The database backend. Each test that uses this fixture runs on SQLite and on PostgreSQL."""
    with backends(request.param, lambda: request.getfixturevalue("postgres")) as made:
        yield made


@pytest.fixture
def engine(backend: DatabaseBackend, tmp_path: Path) -> Iterator[Engine]:
    """A ledger beside a registry that knows the version of its records. SQLite's is in memory."""
    made = ledger_and_registry_engine(None if backend.name == SQLITE else backend.engine(tmp_path, migrated=True))
    yield made
    made.dispose()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger over the test's database. `usefixtures("backend")` runs the test on both backends."""
    with closing(World(tmp_path)) as world:
        yield world.ledger
