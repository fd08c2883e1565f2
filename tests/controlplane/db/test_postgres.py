"""PostgreSQL as the database: one control plane writes, and unanswered commits are resolved. On a real server."""

import asyncio
import gc
import select as select_module
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import psycopg
import pytest
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import OperationalError

from controlplane.clock import SystemClock
from controlplane.db import postgres as subject
from controlplane.db import schema, server_silence
from controlplane.db.availability import open_when_available, watch_write_session
from controlplane.db.database import Database, disposing, open_database, reading_engine
from controlplane.db.ledger_schema import received, request_records
from controlplane.db.postgres_url import PostgresUrl
from controlplane.ledger.usage_ledger import Ledger
from kelvin.contracts.errors import Conflict, Refused, Unavailable
from kelvin.contracts.serving.control_messages import RequestBatch
from tests.controlplane.postgres_server import PRODUCT_SESSION, PostgresServer, database_name, session_with_lock_timeout
from tests.controlplane.postgres_wire import LostMessage, PostgresProxy
from tests.controlplane.usage_records import request_record
from tests.eventually import eventually

AWAY = Unavailable("the database")
WAITS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def add(connection: Connection, tenant: str) -> None:
    connection.execute(insert(schema.tenants).values(tenant=tenant, created_at_s=1))


def cut(place: PostgresUrl) -> str:
    """Return the statement that ends all sessions of the database and waits for their end."""
    return f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{database_name(place)}'"


def tenants(connection: Connection) -> list[str]:
    return list(connection.execute(select(schema.tenants.c.tenant).order_by(schema.tenants.c.tenant)).scalars())


def _read_only(connection: Connection) -> None:
    tenants(connection)


class FastClock(SystemClock):
    """A clock whose sleeps are short."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.005)


@pytest.fixture
def database(place: PostgresUrl) -> Iterator[Database]:
    """An open, migrated database without rows."""
    with closing(open_database(place)) as opened:
        yield opened


@pytest.fixture
def short_lock_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session does not wait for a lock that is taken."""
    monkeypatch.setattr(subject, "_SESSION", session_with_lock_timeout("20ms"))


async def test_postgres_session_settings(place: PostgresUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are durable, a transaction sees one state, waits are bounded, and reading sessions cannot write."""
    monkeypatch.setattr(subject, "_SESSION", PRODUCT_SESSION)
    bounds = {
        "synchronous_commit": "on", "transaction_isolation": "repeatable read", "lock_timeout": "3s",
        "statement_timeout": "30s",
    }  # fmt: skip

    def session_settings(connection: Connection) -> dict[str, str]:
        names = (*bounds, "transaction_read_only")
        return {name: str(connection.execute(text(f"SHOW {name}")).scalar_one()) for name in names}

    with closing(open_database(place)) as database:
        assert await database.write(session_settings) == {**bounds, "transaction_read_only": "off"}
        assert await database.read(session_settings) == {**bounds, "transaction_read_only": "on"}


def test_names_sort_by_their_bytes(place: PostgresUrl) -> None:
    """Each text column has the collation C in any locale. A new column gets it at the next start."""
    otherwise = text(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> "
        "'schema_version' AND data_type IN ('text', 'character varying') AND collation_name IS DISTINCT FROM 'C'"
    )
    with closing(open_database(place)) as database, database.engine.begin() as connection:
        assert connection.execute(otherwise).all() == []
        connection.execute(text("ALTER TABLE tenants ADD COLUMN colour TEXT"))
        connection.execute(text('ALTER TABLE tenants ALTER COLUMN tenant TYPE VARCHAR(63) COLLATE "default"'))
        assert len(connection.execute(otherwise).all()) == 2
    with closing(open_database(place)) as database, database.engine.begin() as connection:
        for tenant in ("b", "a-b", "ab", "B"):
            add(connection, tenant)
        assert tenants(connection) == ["B", "a-b", "ab", "b"]


async def test_one_control_plane_writes(place: PostgresUrl, short_lock_timeout: None) -> None:
    """A second one waits until the first has ended. Reads are possible meanwhile."""
    first = open_database(place)
    with pytest.raises(OperationalError, match="another control plane writes to this database"):
        open_database(place)
    stop = asyncio.Event()
    waiting = asyncio.create_task(open_when_available(place, stop))
    await first.write(lambda connection: add(connection, "t"))
    with disposing(reading_engine(place)) as engine, engine.connect() as connection:
        assert tenants(connection) == ["t"]
    assert not waiting.done()
    first.close()
    second = await asyncio.wait_for(waiting, 60)
    assert second is not None
    assert await second.read(tenants) == ["t"]
    given_up = asyncio.create_task(open_when_available(place, stop))
    stop.set()
    assert await asyncio.wait_for(given_up, 60) is None
    second.close()


@pytest.mark.parametrize("is_known", [True, False], ids=["an earlier writer is fenced", "a new writer counts on"])
async def test_next_lock_holder_sees_the_last_writes(
    postgres: PostgresServer, place: PostgresUrl, is_known: bool
) -> None:
    """Another process wrote and then ended. The next holder of the lock sees that, even if it was waiting already."""
    first, ended = open_database(place) if is_known else None, asyncio.Event()
    if first is not None:
        first.on_fenced = ended.set
        postgres.ask(cut(place))
    with closing(psycopg.connect(place.url, autocommit=True)) as other:
        other.execute("SELECT pg_advisory_lock(%s)", (subject.LOCK,))
        work = open_when_available(place, ended) if first is None else first.write(tenants)
        waiting = asyncio.create_task(work)
        await eventually(lambda: postgres.ask(WAITS, database_name(place)) == [(1,)], "it waits for the lock")
        other.execute("INSERT INTO writers SELECT MAX(number) + 1 FROM writers")
    if first is None:
        opened = await waiting
        assert isinstance(opened, Database)
        opened.close()
        return
    with pytest.raises(Refused):
        await waiting
    assert ended.is_set()
    first.close()


@pytest.mark.parametrize("is_open", [False, True], ids=["while it waits for the lock", "once it is open"])
def test_cancelled_open_releases_the_lock(postgres: PostgresServer, place: PostgresUrl, is_open: bool) -> None:
    """This happens when the lead is lost. A session that the thread still opens must release the lock."""

    async def main(thread: ThreadPoolExecutor) -> None:
        asyncio.get_running_loop().set_default_executor(thread)
        first = None if is_open else open_database(place)
        opening = asyncio.create_task(open_when_available(place, asyncio.Event()))
        if first is None:
            await asyncio.sleep(0)
            thread.submit(int).result(60)  # the work there has ended, but this loop does not know yet
        else:
            await eventually(lambda: postgres.ask(WAITS, database_name(place)) == [(1,)], "it waits for the lock")
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        if first is not None:
            first.close()
        open_database(place).close()

    gc.disable()  # otherwise a collection could close the session
    try:
        with ThreadPoolExecutor(1) as thread:
            asyncio.run(main(thread))
    finally:
        gc.enable()


async def test_there_are_three_sessions(postgres: PostgresServer, place: PostgresUrl, database: Database) -> None:
    """There are three under any load, by the query in the docs."""
    docs = Path(__file__).parents[3].joinpath("docs", "operations", "postgresql.md").read_text()
    query = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database_name(place)}'"
    assert "*Size.* Three sessions" in docs
    assert f"`{query.replace(database_name(place), 'kelvin')}`" in docs

    all_three = Barrier(3)

    def work(connection: Connection) -> list[str]:
        found = tenants(connection)
        all_three.wait(60)
        return found

    await asyncio.gather(database.write(work), *(database.read(work) for _ in range(2)))
    await asyncio.gather(*(database.read(tenants) for _ in range(20)))
    assert postgres.ask(query) == [(3,)]


@pytest.mark.parametrize("replaced", [True, False])
async def test_fenced_writer_ends(
    postgres: PostgresServer, place: PostgresUrl, short_lock_timeout: None, replaced: bool
) -> None:
    """Its sessions were cut and another control plane began, so it writes nothing more and is told to end. Control:
    without another one it continues in a new session.
    """
    first, ended = open_database(place), asyncio.Event()
    first.on_fenced = ended.set
    assert len(postgres.ask(cut(place))) >= 1
    if replaced:
        with closing(open_database(place)):
            with pytest.raises(Refused) as refused:
                await first.write(lambda connection: add(connection, "t"))
            assert refused.value.failure == AWAY
        with pytest.raises(Refused):
            await first.write(lambda connection: add(connection, "t"))
    else:
        await first.write(lambda connection: add(connection, "t"))
    assert ended.is_set() is replaced
    assert await first.read(tenants) == ([] if replaced else ["t"])
    first.close()


@pytest.mark.parametrize("replaced", [True, False])
async def test_idle_writer_keeps_the_lock(
    postgres: PostgresServer, place: PostgresUrl, short_lock_timeout: None, replaced: bool
) -> None:
    """A session that was cut is opened again without a write. A control plane that was replaced is told to end."""
    first, ended = open_database(place), asyncio.Event()
    first.on_fenced = ended.set
    postgres.ask(cut(place))
    if replaced:
        open_database(place).close()
    looking = asyncio.create_task(watch_write_session(first, FastClock()))
    if replaced:
        await asyncio.wait_for(ended.wait(), 60)
    else:
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        await eventually(lambda: postgres.ask(locks, database_name(place)) == [(1,)], "the lock is taken again")
        with pytest.raises(OperationalError, match="another control plane"):
            open_database(place)
        assert not ended.is_set()
    looking.cancel()
    await asyncio.wait({looking})
    first.close()


@pytest.mark.parametrize("lost", LostMessage)
async def test_commit_with_lost_reply_is_applied_once(
    postgres: PostgresServer, place: PostgresUrl, lost: LostMessage
) -> None:
    """A committed transaction counts once and succeeds. Control: one that was not committed is refused as retryable."""
    with (
        PostgresProxy(postgres.directory) as wire,
        closing(open_database(wire.place(database_name(place)))) as database,
    ):
        wire.lose_next = lost
        if lost is LostMessage.ANSWER:
            await database.write(lambda connection: add(connection, "t"))
        else:
            with pytest.raises(Refused) as refused:
                await database.write(lambda connection: add(connection, "t"))
            assert refused.value.failure == AWAY
        assert await database.read(tenants) == (["t"] if lost is LostMessage.ANSWER else [])
        await database.write(lambda connection: add(connection, "u"))


@pytest.mark.parametrize("repeated", [True, False])
async def test_unanswered_commit_during_an_outage(postgres: PostgresServer, place: PostgresUrl, repeated: bool) -> None:
    """The database is unreachable after the COMMIT. Usage records are posted again and stored once. For any other
    write, memory may be stale, so the control plane restarts.
    """
    with (
        PostgresProxy(postgres.directory) as wire,
        closing(open_database(wire.place(database_name(place)))) as database,
    ):
        ledger, ended = Ledger(database), asyncio.Event()
        database.on_fenced = ended.set
        batch = RequestBatch(records=(request_record(1), request_record(2)))

        async def work() -> None:
            if repeated:
                await ledger.append_requests(batch)
            else:
                await database.write(lambda connection: add(connection, "t"))

        wire.lose_next, wire.refuses_connections = LostMessage.ANSWER, True
        with pytest.raises(Refused) as refused:
            await work()
        assert refused.value.failure == AWAY
        wire.refuses_connections = False
        if repeated:
            await work()
            found = await database.read(lambda connection: connection.execute(select(request_records)).all())
            assert len(found) == 2
            spans = await database.read(lambda connection: connection.execute(select(received)).all())
            assert spans == [("activator-1", 1, 2)]
        else:
            with pytest.raises(Refused):
                await work()
            assert await database.read(tenants) == ["t"]
        assert ended.is_set() is not repeated


async def test_killed_server_is_unavailable(postgres: PostgresServer, database: Database) -> None:
    """The server is killed inside a transaction. Calls are refused as retryable until the server is back."""
    await database.write(lambda connection: add(connection, "t"))

    def killed(connection: Connection) -> None:
        add(connection, "half")
        postgres.kill()
        add(connection, "more")

    with pytest.raises(Refused) as refused:
        await database.write(killed)
    assert refused.value.failure == AWAY
    for work in (database.write, database.read):
        with pytest.raises(Refused):
            await work(tenants)
    postgres.start()
    assert await database.read(tenants) == ["t"]
    await database.write(lambda connection: add(connection, "u"))


async def test_stalled_server_refuses_each_call_in_time(
    postgres: PostgresServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls fail after the limit, also queued calls and a commit. Once the server answers, calls succeed again."""
    limit_s = server_silence.LIMIT_S

    async def outcome(call: Awaitable[object]) -> object:
        try:
            return await call
        except Refused as refused:
            return refused.failure

    await database.write(lambda connection: add(connection, "t"))
    assert await database.read(tenants) == ["t"]

    def stalls(connection: Connection) -> None:
        add(connection, "half")
        postgres.stall()

    monkeypatch.setattr(server_silence, "LIMIT_S", 0.5)
    async with asyncio.timeout(30):  # 41 calls of 5 s each would take minutes
        calls = [outcome(database.write(stalls))]
        calls += [outcome(call(tenants)) for call in (database.write, database.read) for _ in range(20)]
        found = await asyncio.gather(*calls)
    postgres.stall(resumed=True)
    monkeypatch.setattr(server_silence, "LIMIT_S", limit_s)
    # Some reads may have finished before the stall.
    assert found[:21] == [AWAY] * 21
    assert all(each in (AWAY, ["t"]) for each in found[21:])
    assert await database.read(tenants) == ["t"]
    await database.write(lambda connection: add(connection, "u"))
    assert await database.read(tenants) == ["t", "u"]


async def test_slow_statement_is_cancelled_at_the_server(
    postgres: PostgresServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session ends and releases the lock, so the next call is served."""
    active = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'"
    limit_s = server_silence.LIMIT_S

    monkeypatch.setattr(server_silence, "LIMIT_S", 0.5)
    with pytest.raises(Refused) as refused:
        await database.write(lambda connection: connection.execute(text("SELECT pg_sleep(600)")))
    monkeypatch.setattr(server_silence, "LIMIT_S", limit_s)
    assert refused.value.failure == AWAY
    await eventually(lambda: postgres.ask(active) == [(0,)], "it is cancelled")
    await database.write(lambda connection: add(connection, "t"))


async def test_failover_that_loses_commits_begins_anew(postgres: PostgresServer, place: PostgresUrl) -> None:
    """Acknowledged data is missing in the database but still in memory. The writer is fenced."""
    with closing(open_database(place)) as database:
        ended = asyncio.Event()
        database.on_fenced = ended.set
        await database.write(lambda connection: add(connection, "t"))
        postgres.keep_copy()
        await database.write(lambda connection: add(connection, "u"))
        postgres.fail_over()
        with pytest.raises(Refused) as refused:
            await database.write(tenants)
        assert refused.value.failure == AWAY
        assert ended.is_set()
    with closing(open_database(place)) as database:
        assert await database.read(tenants) == ["t"]


async def test_failover_behind_the_first_start_begins_anew(postgres: PostgresServer) -> None:
    """The server lost the control plane's own row, and another control plane took its number."""
    place = postgres.database()
    try:
        postgres.keep_copy()
        with closing(open_database(place)) as database:
            ended = asyncio.Event()
            database.on_fenced = ended.set
            await database.write(lambda connection: add(connection, "t"))
            postgres.fail_over()
            open_database(place).close()
            with pytest.raises(Refused):
                await database.write(tenants)
            assert ended.is_set()
    finally:
        postgres.drop(place)


async def test_failover_that_loses_nothing_goes_on(postgres: PostgresServer, database: Database) -> None:
    """A standby with all commits is promoted. The timeline is new, and the control plane continues."""
    ended = asyncio.Event()
    database.on_fenced = ended.set
    await database.write(lambda connection: add(connection, "t"))
    postgres.become_standby()
    with pytest.raises(Refused) as refused:
        await database.write(lambda connection: add(connection, "u"))
    assert refused.value.failure == AWAY
    assert await database.read(tenants) == ["t"]
    postgres.promote()
    await database.write(lambda connection: add(connection, "u"))
    assert await database.read(tenants) == ["t", "u"]
    assert not ended.is_set()


@pytest.mark.parametrize("is_lost", [True, False])
async def test_commit_without_an_answer_and_a_failover(
    postgres: PostgresServer, place: PostgresUrl, is_lost: bool
) -> None:
    """The new server may not know the transaction. The call is refused as retryable, and later calls are served. If the
    server lost earlier commits, too, the control plane restarts.
    """
    with (
        PostgresProxy(postgres.directory) as wire,
        closing(open_database(wire.place(database_name(place)))) as database,
    ):
        ended = asyncio.Event()
        database.on_fenced = ended.set
        if is_lost:
            postgres.keep_copy()
            await database.write(lambda connection: add(connection, "s"))
        else:
            await database.write(lambda connection: add(connection, "s"))
            postgres.keep_copy()
            await database.write(_read_only)  # opens a new session
        wire.lose_next, wire.refuses_connections = LostMessage.ANSWER, True
        with pytest.raises(Refused) as refused:
            await database.write(lambda connection: add(connection, "t"))
        assert refused.value.failure == AWAY
        postgres.fail_over()
        wire.refuses_connections = False
        if is_lost:
            with pytest.raises(Refused):
                await database.write(tenants)
        else:
            await database.write(lambda connection: add(connection, "u"))
            assert await database.read(tenants) == ["s", "u"]
        assert ended.is_set() is is_lost


@pytest.mark.parametrize("ending", ["idle_in_transaction_session_timeout", "statement_timeout"])
async def test_session_that_the_server_ends_is_a_passing_failure(database: Database, ending: str) -> None:
    """The server ends an idle transaction and a slow statement. Neither is a defect."""

    def late(connection: Connection) -> None:
        add(connection, "t")
        connection.execute(text(f"SET LOCAL {ending} = 1"))
        if ending.startswith("idle"):
            driver = connection.connection.driver_connection
            assert driver is not None
            select_module.select([driver.fileno()], [], [], 60)  # until the server has ended the session
        connection.execute(text("SELECT pg_sleep(60)"))

    with pytest.raises(Refused) as refused:
        await database.write(late)
    assert refused.value.failure == AWAY
    assert await database.read(tenants) == []
    await database.write(lambda connection: add(connection, "u"))


async def test_standby_is_waited_for_and_named(postgres: PostgresServer, place: PostgresUrl) -> None:
    """A start on a read-only standby names it in the readiness text, and continues once the server takes writes."""
    waits_for: list[str] = []

    postgres.become_standby()
    opening = asyncio.create_task(open_when_available(place, asyncio.Event(), waits_for.append))
    await eventually(lambda: opening.done() or len(waits_for) > 1, "it says so")
    assert not opening.done()
    postgres.promote()
    opened = await asyncio.wait_for(opening, 60)
    assert opened is not None
    opened.close()
    assert waits_for[0] == "the database"
    assert "the database: its server is read-only, as a standby is" in waits_for


def test_postgres_backup_is_refused(database: Database, tmp_path: Path) -> None:
    """The error names pg_dump."""
    with pytest.raises(Refused) as refused:
        database.copy(tmp_path / "copy")
    assert isinstance(refused.value.failure, Conflict)
    assert "pg_dump" in refused.value.failure.message
    assert not (tmp_path / "copy").exists()
