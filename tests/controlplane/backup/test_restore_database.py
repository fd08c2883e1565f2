"""A backup is restored into PostgreSQL or into a file: every row of every table, compared afterwards, or nothing."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Table, insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

import controlplane.db.postgres
from controlplane.audit.audit_rows import expire, set_window_days
from controlplane.backup import restore_target
from controlplane.backup.backup_directory import backup_name
from controlplane.backup.backups import back_up_stopped, main
from controlplane.backup.restore_program import restore
from controlplane.backup.restore_target import TABLES, CannotRestore, NotEmpty
from controlplane.billing.billing_report import CLOSING_DELAY_US, billing_report, close_month
from controlplane.db import schema
from controlplane.db.database import Database, disposing, open_database, reading_engine, sqlite_engine, stream_rows
from controlplane.db.ledger_schema import IN_USE, UNKNOWN, journal_position
from controlplane.db.migrations import NewerDatabase
from controlplane.db.postgres_url import PostgresUrl
from controlplane.ledger.policy.month import month_of
from controlplane.ledger.received_sequences import insert_rows
from controlplane.ledger_check.ledger_verification import verify_all_chains
from kelvin.contracts.accounting.backup_reports import RestoreReport
from kelvin.contracts.errors import CapacityExceeded
from kelvin.contracts.serving.control_messages import RequestBatch, RunningLifetimes
from kelvin.contracts.setting_parser import BadSetting
from kelvin.contracts.wire import encode
from kelvin.spool.segment_writer import SegmentWriter
from tests.controlplane.billing_fixture import BOOK, GOLDEN, enter
from tests.controlplane.builders import BY, NOW_S, ids, installed
from tests.controlplane.postgres_server import PostgresServer, database_name, session_with_lock_timeout
from tests.controlplane.postgres_wire import LostMessage, PostgresProxy
from tests.controlplane.usage_records import END_US, HOUR_US, MONTH, lifetime_record, request_record

DAYS_S = 86_400
NEXT = month_of(END_US + 1)
MADE = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"


@pytest.fixture
def empty(postgres: PostgresServer) -> Iterator[PostgresUrl]:
    """A database without tables."""
    made = postgres.database(migrated=False)
    yield made
    postgres.drop(made)


def filled(root: Path, *statements: str) -> Path:
    """Back up a stopped installation with rows in every table, after running these statements."""

    async def fill() -> None:
        async with installed(root, has_journal=False) as world:
            with world.database.engine.begin() as connection:
                connection.execute(insert(schema.tenants).values(tenant="acme", created_at_s=1))
                grant = {"tenant": "default", "model": "m", "grantee": "acme", "created_at_s": 1}
                connection.execute(insert(schema.grants).values(grant))
                set_window_days(connection, "default", {"keys": 1})
                assert expire(connection, BY, "default", NOW_S + 3 * DAYS_S) > 0
            enter(world.database.engine, [request_record(1), lifetime_record(1)])
            enter(world.database.engine, [request_record(1, completion_tokens=8)])  # contradicts the first record
            enter(world.database.engine, [request_record(2, ended_at_us=END_US + 1)])
            with world.database.engine.begin() as connection:
                close_month(connection, BOOK, "acme", MONTH, live=None, now_us=END_US + CLOSING_DELAY_US)
            late = request_record(3, degraded="cap-output=64", once="é" * 64, prompt_tokens=2**52)
            await world.ledger.append_requests(RequestBatch(records=(late,)))
            await world.ledger.record_running_replicas(
                RunningLifetimes(records=(lifetime_record(2, sequence=0),)), END_US - HOUR_US
            )
            with world.database.engine.begin() as connection:
                connection.execute(insert(journal_position).values(id=1, position=7))
                for statement in statements:
                    connection.execute(text(statement))

    asyncio.run(fill())
    return backed_up(root / "data")


def backed_up(data: Path) -> Path:
    """Back up a stopped installation to a file beside its directory."""
    path = data.with_name("made.backup")
    with path.open("wb") as file:
        back_up_stopped(data, file)
    return path


def into(database: PostgresUrl | Path, source: Path, *, accept_unsound: bool = False) -> RestoreReport:
    """Restore into that database only."""
    return restore(source, None, replace=False, accept_unsound=accept_unsound, database=database)


def everything(connection: Connection) -> dict[str, list[Any]]:
    """Return every row, by table."""
    return {
        table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
        for table in TABLES
    }


def in_file(path: Path) -> dict[str, list[Any]]:
    with disposing(sqlite_engine(path)) as engine, engine.connect() as connection:
        return everything(connection)


def restored(made: Path) -> dict[str, list[Any]]:
    """Return the rows of the source as a restore leaves them. The position in the journal is unknown then."""
    return in_file(made.with_name("data") / "kelvin.db") | {journal_position.name: [(IN_USE, UNKNOWN)]}


def bills(connection: Connection) -> list[Any]:
    return [billing_report(connection, BOOK, "acme", month, live=None, now_us=END_US) for month in (MONTH, NEXT)]


def test_restore_into_postgres_copies_every_row(empty: PostgresUrl, tmp_path: Path) -> None:
    """Every table has rows. Bills are the same, chains hold, the audit is protected, and the source file is unchanged.
    A control plane can open the result.
    """
    made = filled(tmp_path)
    with disposing(sqlite_engine(tmp_path / "data" / "kelvin.db")) as engine, engine.connect() as connection:
        before, billed, sound = everything(connection), bills(connection), verify_all_chains(connection)
    assert [name for name, rows in before.items() if not rows] == []
    report = into(empty, made)
    assert report.sound
    assert (report.database, report.placed, report.aside, report.missing) == (empty.url, (), None, 0)
    assert (report.chains, report.audits) == (sound.ledger, sound.audits)
    assert sum(each.links for each in report.chains) == 6
    assert in_file(tmp_path / "data" / "kelvin.db") == before
    with closing(open_database(empty)) as database:
        with database.engine.begin() as connection:
            assert everything(connection) == restored(made)
            assert bills(connection) == billed
        for forgery in ("UPDATE audit SET actor = 'x'", "INSERT INTO audit SELECT * FROM audit", "DELETE FROM audit"):
            with pytest.raises(IntegrityError), database.engine.begin() as connection:
                connection.execute(text(forgery))


async def test_spools_and_journal_are_entered(empty: PostgresUrl, tmp_path: Path) -> None:
    """All acknowledged records are restored, as into a data directory."""
    async with installed(tmp_path) as world:
        await world.enter(1)
        directory = world.data / "spool" / "activator-1"
        directory.mkdir(parents=True)
        with closing(SegmentWriter(directory)) as spool:
            spool.commit([lambda _: encode(request_record(2))])
        assert await world.backup_loop().make_backup() is not None
        await world.enter(3)
    report = into(empty, tmp_path / "place")
    assert (report.unshipped, report.replayed, report.missing) == (1, 1, 0)
    with disposing(reading_engine(empty)) as engine, engine.connect() as connection:
        found = connection.execute(text("SELECT request_id FROM ledger_requests ORDER BY sequence")).scalars().all()
    assert found == ["req-1", "req-2", "req-3"]


async def test_journal_after_a_stopped_backup_is_restored(tmp_path: Path) -> None:
    """Such a backup in the backup directory is used like any other: later journal entries are restored, too."""
    async with installed(tmp_path) as world:
        await world.ledger.write_due_marks()
        await world.enter(1)
        world.close()
        made = await asyncio.to_thread(backed_up, world.data)
        made.rename(world.place / backup_name(NOW_S))
        world.open()
        await world.enter(2)
    report = into(tmp_path / "new.db", tmp_path / "place")
    assert (report.replayed, report.missing) == (1, 0)
    assert ids(tmp_path / "new.db") == ["req-1", "req-2"]


def test_an_older_file_is_brought_forward_in_the_backup_alone(empty: PostgresUrl, tmp_path: Path) -> None:
    """The program that wrote the file can still use it. A file of a newer program is refused."""
    path = tmp_path / "data" / "kelvin.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as old:
        old.executescript(GOLDEN.read_text())
        before = list(old.iterdump())
        report = into(empty, backed_up(path.parent))
        assert list(old.iterdump()) == before
    assert report.sound
    assert sum(each.links for each in report.chains) > 0
    with closing(open_database(path)):
        pass
    with closing(sqlite3.connect(path)) as newer:
        newer.execute("INSERT INTO schema_version VALUES (999, 'x')")
        newer.commit()
    with pytest.raises(NewerDatabase, match="is at schema 999"):
        backed_up(path.parent)
    assert {each.name for each in path.parent.glob(".backup-*")} == set()


@pytest.mark.parametrize("at", [112, 4096, 8192], ids=["the schema", "the first page behind it", "a page of a table"])
def test_a_damaged_file_is_not_backed_up(tmp_path: Path, at: int) -> None:
    """No restore would accept that backup. The error names the file in one line, and the file stays unchanged."""
    path = tmp_path / "data" / "kelvin.db"
    path.parent.mkdir()
    open_database(path).close()
    content = bytearray(path.read_bytes())
    content[at : at + 200] = b"\xff" * 200
    path.write_bytes(content)
    with pytest.raises(BadSetting, match=r"kelvin\.db is damaged \(") as refused:
        backed_up(path.parent)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == content


def test_a_stopped_installation_is_copied_once(tmp_path: Path) -> None:
    """Its disk needs room for one copy of kelvin.db, not two. The copy is removed."""
    copies = set[int]()

    class Watching(BytesIO):
        def write(self, piece: Any) -> int:
            copies.add(len(list(tmp_path.glob(".backup-*/kelvin.db"))))
            return super().write(piece)

    open_database(tmp_path / "kelvin.db").close()
    back_up_stopped(tmp_path, Watching())
    assert copies == {1}
    assert list(tmp_path.glob(".backup-*")) == []


def test_full_disk_of_a_stopped_installation_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The migration of the copy finds no room. The message is the API's."""

    def no_room(_: Path) -> Database:
        full = sqlite3.OperationalError("database or disk is full")
        full.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise OperationalError("CREATE TABLE t", None, full)

    monkeypatch.setattr("controlplane.backup.backups.open_database", no_room)
    monkeypatch.setattr("controlplane.backup.backups.protect_memory", lambda: None)
    open_database(tmp_path / "kelvin.db").close()
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{CapacityExceeded('bytes on the disk of the database', 1, 0).message}\n"


@pytest.mark.parametrize("at", [112, 8192], ids=["the schema", "a page of a table"])
async def test_a_backup_of_a_damaged_file_is_not_restored(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is one line, for any damaged page."""

    def damage(_: Database, path: Path) -> None:
        content = bytearray(made.read_bytes())
        content[at : at + 200] = b"\xff" * 200
        path.write_bytes(content)

    made = tmp_path / "made.db"
    open_database(made).close()
    monkeypatch.setattr(Database, "copy", damage)
    async with installed(tmp_path) as world:
        source = await world.back_up(tmp_path / "made.backup")
    with pytest.raises(CannotRestore, match=r"the database (is damaged|can't be opened): .") as refused:
        into(tmp_path / "new.db", source)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        pytest.param(
            ("UPDATE ledger_requests SET prompt_tokens = 1 WHERE sequence = 2",),
            f"the ledger of acme {NEXT} is not sound: request req-2",
            id="a row that was changed",
        ),
        pytest.param(
            ("DROP TRIGGER audit_keeps", "UPDATE audit SET at_s = at_s + 1 WHERE link = 1 AND tenant = 'default'"),
            "the audit of default is not sound: link 1",
            id="an audit entry that was changed",
        ),
        pytest.param(
            ("UPDATE tenants SET state = replace(hex(zeroblob(50)), '0', 'x')",),
            r"tenants: value too long for type character varying\(16\)",
            id="longer than its column",
        ),
        pytest.param(
            ("UPDATE tenants SET state = 'a' || char(0) || 'secret'",),
            "tenants: PostgreSQL text fields cannot contain NUL",
            id="a text with a NUL",
        ),
    ],
)
def test_unrestorable_backup_leaves_the_database_empty(
    postgres: PostgresServer, empty: PostgresUrl, tmp_path: Path, statements: tuple[str, ...], says: str
) -> None:
    """The error names the problem without a value of a row, and no table has a row."""
    made = filled(tmp_path, *statements)
    with pytest.raises(CannotRestore, match=says) as refused:
        into(empty, made)
    assert not any(value in str(refused.value) for value in ("secret", "xxx"))
    there = {name for (name,) in postgres.ask(MADE, database_name(empty))} & {table.name for table in TABLES}
    for name in there:
        assert postgres.ask(f"SELECT count(*) FROM {name}", database_name(empty)) == [(0,)]


def test_what_is_not_sound_is_restored_as_it_is_if_asked_for(empty: PostgresUrl, tmp_path: Path) -> None:
    """The report names the unsound chain."""
    made = filled(tmp_path, "UPDATE ledger_requests SET prompt_tokens = 1 WHERE sequence = 2")
    report = into(empty, made, accept_unsound=True)
    assert [(each.tenant, each.month) for each in report.chains if each.difference] == [("acme", NEXT)]
    with disposing(reading_engine(empty)) as engine, engine.connect() as connection:
        assert everything(connection) == restored(made)


def test_database_in_use_is_left_unchanged(postgres: PostgresServer, empty: PostgresUrl, tmp_path: Path) -> None:
    """A database with rows gets no tables. An empty database that a control plane holds is refused, too."""
    made = filled(tmp_path)
    postgres.ask("CREATE TABLE keys (key_id TEXT PRIMARY KEY)", database_name(empty))
    postgres.ask("INSERT INTO keys VALUES ('somebody else''s')", database_name(empty))
    says = rf"{database_name(empty)}.* is not empty \(there are rows in keys\): create another"
    with pytest.raises(NotEmpty, match=says):
        into(empty, made)
    assert postgres.ask(MADE, database_name(empty)) == [("keys",)]
    held = postgres.database()
    with closing(open_database(held)), pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(controlplane.db.postgres, "_SESSION", session_with_lock_timeout("20ms"))
        with pytest.raises(CannotRestore, match="another control plane writes to this database"):
            into(held, made)
    into(held, made)
    postgres.drop(held)


@pytest.mark.parametrize("lost", LostMessage)
def test_restore_interrupted_at_its_commit(
    postgres: PostgresServer, empty: PostgresUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: LostMessage
) -> None:
    """An uncommitted restore has changed nothing and can be repeated. A committed one is complete without an answer."""
    made = filled(tmp_path)
    with PostgresProxy(postgres.directory) as wire:

        def compared(*arguments: Any) -> Any:
            wire.lose_next = lost
            return stream_rows(*arguments)

        monkeypatch.setattr(restore_target, "stream_rows", compared)
        place = wire.place(database_name(empty))
        if lost is LostMessage.ORDER:
            with pytest.raises(CannotRestore, match=r"postgresql://"):
                into(place, made)
            assert postgres.ask("SELECT count(*) FROM tenants", database_name(empty)) == [(0,)]
            monkeypatch.undo()
        assert into(place, made).sound
    with disposing(reading_engine(empty)) as engine, engine.connect() as connection:
        assert everything(connection) == restored(made)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda rows: rows[1:], id="a row is lost"),
        pytest.param(lambda rows: [(*rows[0][:-1], rows[0][-1] + 1)], id="a figure differs"),
        pytest.param(None, id="control: no difference"),
    ],
)
def test_restored_row_that_differs_is_noticed(
    empty: PostgresUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], Any] | None
) -> None:
    """The comparison also covers rows that are in no chain."""
    made = filled(tmp_path)

    def spoiled(connection: Connection, table: Table, rows: Any) -> None:
        insert_rows(connection, table, spoil(rows) if spoil is not None and table is schema.grants else rows)

    monkeypatch.setattr(restore_target, "insert_rows", spoiled)
    if spoil is None:
        assert into(empty, made).sound
        return
    with pytest.raises(CannotRestore, match="grants: the copy differs from the backup"):
        into(empty, made)


def test_restore_into_missing_database_fails(postgres: PostgresServer, tmp_path: Path) -> None:
    with pytest.raises(CannotRestore, match=r'database "none" does not exist'):
        into(postgres.place("none"), filled(tmp_path))


def test_a_file_is_made_or_left_alone(tmp_path: Path) -> None:
    """An empty file is used. A file with content, or with a log beside it, stays unchanged."""
    made, path = filled(tmp_path), tmp_path / "there" / "new.db"
    path.parent.mkdir()
    path.touch()
    report = into(path, made)
    assert (report.sound, report.database, report.placed) == (True, str(path), ())
    assert path.stat().st_mode & 0o777 == 0o600
    assert {each.name for each in path.parent.iterdir()} == {"new.db"}
    assert in_file(path) == restored(made)
    content = path.read_bytes()
    with pytest.raises(NotEmpty, match=r"new\.db is there, and not empty: name another file"):
        into(path, made)
    assert path.read_bytes() == content
    (tmp_path / "other.db-wal").write_bytes(b"of another database")
    with pytest.raises(NotEmpty, match=r"other\.db-wal is there"):
        into(tmp_path / "other.db", made)
