"""The ground of scenarios: a run directory with a fake zygote in it, and the databases that stores run on."""

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
    """The data directory of a whole control plane, likewise."""
    where = tmp_path / "data"
    with fake_zygote(RunDirectory(where / "run")):
        yield where


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    """Of this worker's own: to make one takes less than to agree on one.

    On a busy machine a session that was closed may hold its lock for a while yet: whoever comes next has patience.
    """
    with PostgresServer() as made, pytest.MonkeyPatch.context() as patched:
        patched.setattr(controlplane.db.postgres, "_SESSION", session_with_lock_timeout("60s"))
        patched.setattr(controlplane.db.server_silence, "LIMIT_S", 90.0)
        yield made


@pytest.fixture
def postgres(server: PostgresServer) -> Iterator[PostgresServer]:
    """It answers, and does afterwards, whatever a test did to it."""
    yield server
    if not server.runs:
        server.start()
    server.stall(resumed=True)
    server.promote()


@pytest.fixture
def place(postgres: PostgresServer) -> Iterator[PostgresUrl]:
    """A database of the test's own, as a control plane leaves it."""
    made = postgres.database()
    yield made
    postgres.drop(made)


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def backend(request: pytest.FixtureRequest) -> Iterator[DatabaseBackend]:
    """Every test that asks for it runs on each."""
    with backends(request.param, lambda: request.getfixturevalue("postgres")) as made:
        yield made


@pytest.fixture
def engine(backend: DatabaseBackend, tmp_path: Path) -> Iterator[Engine]:
    """A ledger beside a registry that knows the version of its records; SQLite's is in memory."""
    made = ledger_and_registry_engine(None if backend.name == SQLITE else backend.engine(tmp_path, migrated=True))
    yield made
    made.dispose()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Over the test's database. `usefixtures("backend")` makes it that of either kind."""
    with closing(World(tmp_path)) as world:
        yield world.ledger
