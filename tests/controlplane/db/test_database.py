"""SQLite as the database: commits are durable, readers see whole transactions, and writers never collide."""

import asyncio
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import OperationalError

from controlplane.db import schema
from controlplane.db.database import Database, sqlite_engine
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.key_store import KeyStore
from controlplane.registry.policy.access import KeySpec
from kelvin.contracts.errors import CapacityExceeded, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Scope
from tests.controlplane.builders import BY, NOW_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kelvin.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with closing(Database(sqlite_engine(path))) as made:
        yield made


def _add(connection: Connection, tenant: str) -> None:
    connection.execute(insert(schema.tenants).values(tenant=tenant, created_at_s=1))


def _tenants(connection: Connection) -> set[str]:
    return set(connection.execute(select(schema.tenants.c.tenant)).scalars())


async def test_database_is_durable_and_private(path: Path, database: Database) -> None:
    """Every connection uses WAL with synchronous=FULL. Only the owner can read the files."""

    def pragmas(connection: Connection) -> tuple[str, int, int]:
        def ask(name: str) -> int | str:
            found: int | str = connection.execute(text(f"PRAGMA {name}")).scalar_one()
            return found

        return str(ask("journal_mode")), int(ask("synchronous")), int(ask("foreign_keys"))

    assert await database.read(pragmas) == ("wal", 2, 1)
    assert await database.write(pragmas) == ("wal", 2, 1)
    await database.write(lambda connection: _add(connection, "t"))
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


async def test_written_rows_survive_reopening(path: Path) -> None:
    database = Database(sqlite_engine(path))
    await database.write(lambda connection: _add(connection, "t"))
    database.close()
    again = Database(sqlite_engine(path))
    assert await again.read(_tenants) == {"t"}
    again.close()


async def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    def breaks(connection: Connection) -> None:
        _add(connection, "half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await database.write(breaks)
    assert await database.read(_tenants) == set()


async def test_many_writers_and_readers_at_once(database: Database) -> None:
    """Two hundred writes that read first run beside as many reads. None is refused or lost."""

    def read_then_add(connection: Connection, name: str) -> None:
        assert name not in _tenants(connection)
        _add(connection, name)

    names = [f"t{number}" for number in range(200)]
    writes = [database.write(lambda connection, name=name: read_then_add(connection, name)) for name in names]  # type: ignore[misc]
    reads = [database.read(_tenants) for _ in names]
    await asyncio.gather(*writes, *reads)
    assert await database.read(_tenants) == set(names)


async def test_a_reader_does_not_wait_for_a_writer(database: Database) -> None:
    """A reader sees nothing of a long transaction, and does not wait for it."""
    inside, leave = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        _add(connection, "t")
        inside.set()
        assert leave.wait(60)

    writing = asyncio.create_task(database.write(slow))
    assert await asyncio.to_thread(inside.wait, 30)
    async with asyncio.timeout(30):
        assert await database.read(_tenants) == set()
    leave.set()
    await writing
    assert await database.read(_tenants) == {"t"}


async def test_a_lock_of_another_process_is_a_passing_failure(path: Path) -> None:
    """The call is refused as retryable, and its transaction is rolled back. Other errors stay unchanged."""
    database = Database(sqlite_engine(path, busy_ms=1))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Refused, match="unavailable: the database is not available") as refused:
            await database.write(lambda connection: _add(connection, "t"))
        assert refused.value.failure.retryable
        assert await database.read(_tenants) == set()
        other.execute("ROLLBACK")
    await database.write(lambda connection: _add(connection, "t"))
    assert await database.read(_tenants) == {"t"}
    with pytest.raises(OperationalError, match="no such table"):
        await database.write(lambda connection: connection.execute(text("DELETE FROM missing")))
    database.close()


async def test_damaged_text_is_reported(path: Path, database: Database) -> None:
    """It is not retryable, and the driver's message is kept."""
    await database.write(lambda connection: _add(connection, "t"))
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE tenants SET tenant = CAST(X'ff' AS TEXT)")
    with pytest.raises(OperationalError, match="Could not decode to UTF-8"):
        await database.read(_tenants)


def _overwrite(path: Path) -> None:
    """Overwrite everything behind the file header."""
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(100)
        file.write(b"\xff" * (size - 100))


def _cut(path: Path) -> None:
    """Cut the file after its first page."""
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.truncate(4096)


@pytest.mark.parametrize("spoil", [pytest.param(_overwrite, id="corrupt"), pytest.param(_cut, id="cut")])
async def test_damaged_file_is_refused_by_name(path: Path, database: Database, spoil: Callable[[Path], None]) -> None:
    """It is neither a defect nor a state that clients should poll each second."""
    spoil(path)
    for call in (database.read, database.write):
        with pytest.raises(Refused) as refused:
            await call(_tenants)
        assert refused.value.failure == Unavailable("the database, whose files are damaged,", 60.0)


async def test_read_only_file_is_refused(database: Database) -> None:
    """A disk may become read-only after an error. Existing data can still be read."""

    def adds_nothing(connection: Connection) -> None:
        connection.execute(text("PRAGMA query_only=ON"))
        try:
            _add(connection, "t")
        finally:
            connection.execute(text("PRAGMA query_only=OFF"))

    with pytest.raises(Refused) as refused:
        await database.write(adds_nothing)
    assert refused.value.failure == Unavailable("the database")
    assert await database.read(_tenants) == set()
    await database.write(lambda connection: _add(connection, "t"))


async def test_full_disk_is_reported_and_leaves_nothing(path: Path, database: Database) -> None:
    """A key that does not fit is refused, not published, and has no audit entry. Existing data can be read."""

    def fill(connection: Connection) -> None:
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count={pages}"))

    def entries(connection: Connection) -> int:
        found: int = connection.execute(text("SELECT count(*) FROM audit")).scalar_one()
        return found

    feed = FeedHub()
    keys = KeyStore(database, feed)
    await keys.bootstrap(path.parent, NOW_S)
    await database.write(fill)
    made, recorded = 0, await database.read(entries)
    with pytest.raises(Refused) as refused:  # noqa: PT012 - some fit into the pages that there are
        for made in range(1000):
            await keys.create(BY, "default", KeySpec(f"key-{made}", (Scope.INFER,), ()), None, NOW_S)
    assert refused.value.failure == CapacityExceeded("bytes on the disk of the database", 1, 0)
    assert len(await keys.tenant_keys("default", NOW_S)) == len(feed.snapshot().keys) == 2 + made
    assert await database.read(entries) == recorded + made
