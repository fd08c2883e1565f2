"""A kelvin.db becomes a PostgreSQL: every row of every table, proved there, or nothing of it."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Table, insert, select, text
from sqlalchemy.exc import IntegrityError

import controlplane.postgres
from contracts.control import LivesSoFar, RequestBatch
from controlplane import database_copy, schema
from controlplane.arrivals import insert_rows
from controlplane.audit import expire, set_days
from controlplane.billing import LATE_US, billing_report, close_month
from controlplane.database_copy import TABLES, CannotCopy, copy_database
from controlplane.ledger_schema import journal_position
from controlplane.policy.month import month_of
from controlplane.postgres_place import PostgresPlace
from controlplane.store import disposing, open_database, reading_engine, sqlite_engine
from controlplane.verify import Soundness, soundness_of
from tests.controlplane.billing_ground import BOOK, enter
from tests.controlplane.builders import BY, NOW_S
from tests.controlplane.postgres_server import PostgresServer, name_of, waiting_for_locks
from tests.controlplane.postgres_wire import Lost, Wire
from tests.controlplane.test_ledger_migrations import GOLDEN
from tests.controlplane.test_restore import World, in_world
from tests.controlplane.usage_records import END_US, HOUR_US, MONTH, lifetime_record, request_record

DAYS_S = 86_400
NEXT = month_of(END_US + 1)
MADE = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"


@pytest.fixture
def empty(postgres: PostgresServer) -> Iterator[PostgresPlace]:
    """A database in which nobody has begun."""
    made = postgres.database(migrated=False)
    yield made
    postgres.drop(made)


def filled(root: Path, *statements: str) -> Path:
    """The data directory of an installation that has something of everything, and what these do to it."""

    async def scenario(world: World) -> None:
        with world.database.engine.begin() as connection:
            connection.execute(insert(schema.tenants).values(tenant="acme", created_at_s=1))
            grant = {"tenant": "default", "model": "m", "grantee": "acme", "created_at_s": 1}
            connection.execute(insert(schema.grants).values(grant))
            set_days(connection, "default", {"keys": 1})
            assert expire(connection, BY, "default", NOW_S + 3 * DAYS_S) > 0
        enter(world.database.engine, [request_record(1), lifetime_record(1)])
        enter(world.database.engine, [request_record(1, completion_tokens=8)])  # which contradicts it
        enter(world.database.engine, [request_record(2, ended_at_us=END_US + 1)])
        with world.database.engine.begin() as connection:
            close_month(connection, BOOK, "acme", MONTH, live=None, now_us=END_US + LATE_US)
        late = request_record(3, degraded="cap-output=64", once="é" * 64, prompt_tokens=2**52)
        await world.ledger.append_requests(RequestBatch(records=(late,)))
        await world.ledger.note_lives(LivesSoFar(records=(lifetime_record(2, sequence=0),)), END_US - HOUR_US)
        with world.database.engine.begin() as connection:
            connection.execute(insert(journal_position).values(id=1, position=7))
            for statement in statements:
                connection.execute(text(statement))

    in_world(root, scenario, journal=False)
    return root / "data"


def everything(connection: Connection) -> dict[str, list[Any]]:
    """Every row, by table."""
    return {
        table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
        for table in TABLES
    }


def in_file(data: Path) -> dict[str, list[Any]]:
    with disposing(sqlite_engine(data / "kelvin.db")) as engine, engine.connect() as connection:
        return everything(connection)


def bills(connection: Connection) -> list[Any]:
    return [billing_report(connection, BOOK, "acme", month, live=None, now_us=END_US) for month in (MONTH, NEXT)]


def test_all_of_it_arrives(empty: PostgresPlace, tmp_path: Path) -> None:
    """Of no table nothing. Bills are what they were, chains hold, the audit is guarded again, the file is as it was;
    a control plane can go on with it.
    """
    data = filled(tmp_path)
    with disposing(sqlite_engine(data / "kelvin.db")) as engine, engine.connect() as connection:
        before, billed, sound = everything(connection), bills(connection), soundness_of(connection)
    assert [name for name, rows in before.items() if not rows] == []
    report = copy_database(data, empty)
    assert report.sound
    assert {each.table: each.rows for each in report.tables} == {name: len(rows) for name, rows in before.items()}
    assert Soundness(report.chains, report.audits) == sound
    assert sum(each.links for each in report.chains) == 6
    assert in_file(data) == before
    with closing(open_database(empty)) as database:
        with database.engine.begin() as connection:
            assert everything(connection) == before
            assert bills(connection) == billed
        for forgery in ("UPDATE audit SET actor = 'x'", "INSERT INTO audit SELECT * FROM audit", "DELETE FROM audit"):
            with pytest.raises(IntegrityError), database.engine.begin() as connection:
                connection.execute(text(forgery))


def test_an_older_file_is_brought_forward(empty: PostgresPlace, tmp_path: Path) -> None:
    """As at any start of this program."""
    with closing(sqlite3.connect(tmp_path / "kelvin.db")) as old:
        old.executescript(GOLDEN.read_text())
    report = copy_database(tmp_path, empty)
    assert report.sound
    assert sum(each.links for each in report.chains) > 0


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        pytest.param(("INSERT INTO schema_version VALUES (999, 'x')",), "is at schema 999", id="of a newer program"),
        pytest.param(
            ("UPDATE ledger_requests SET prompt_tokens = 1 WHERE sequence = 2",),
            f"the ledger of acme {NEXT} is not sound: request req-2",
            id="a row that was changed",
        ),
        pytest.param(
            ("DROP TRIGGER audit_keeps", "UPDATE audit SET at_s = at_s + 1 WHERE link = 1 AND tenant = 'default'"),
            "the audit of default is not sound: link 1",
            id="an entry that was changed",
        ),
        pytest.param(
            ("UPDATE tenants SET plan = replace(hex(zeroblob(50)), '0', 'x')",),
            r"tenants: value too long for type character varying\(63\)",
            id="longer than its column",
        ),
        pytest.param(
            ("UPDATE tenants SET plan = 'a' || char(0) || 'secret'",),
            "tenants: PostgreSQL text fields cannot contain NUL",
            id="a text that is none there",
        ),
    ],
)
def test_what_can_t_be_copied_is_not(
    postgres: PostgresServer, empty: PostgresPlace, tmp_path: Path, statements: tuple[str, ...], says: str
) -> None:
    """It is named, with no value of a row, and there is no row of anything."""
    data = filled(tmp_path, *statements)
    with pytest.raises(CannotCopy, match=says) as refused:
        copy_database(data, empty)
    assert not any(value in str(refused.value) for value in ("secret", "xxx"))
    there = {name for (name,) in postgres.ask(MADE, name_of(empty))} & {table.name for table in TABLES}
    for name in there:
        assert postgres.ask(f"SELECT count(*) FROM {name}", name_of(empty)) == [(0,)]


def test_what_is_not_sound_is_copied_as_it_is_if_asked_for(empty: PostgresPlace, tmp_path: Path) -> None:
    """And it is told that it isn't."""
    data = filled(tmp_path, "UPDATE ledger_requests SET prompt_tokens = 1 WHERE sequence = 2")
    report = copy_database(data, empty, accept_unsound=True)
    assert [(each.tenant, each.month) for each in report.chains if each.difference] == [("acme", NEXT)]
    with disposing(reading_engine(empty)) as engine, engine.connect() as connection:
        assert everything(connection) == in_file(data)


def test_a_place_that_is_taken_is_left_alone(postgres: PostgresServer, empty: PostgresPlace, tmp_path: Path) -> None:
    """One with rows of ours, in which nothing is made, and one that a control plane holds, though it is empty."""
    data = filled(tmp_path)
    postgres.ask("CREATE TABLE keys (key_id TEXT PRIMARY KEY)", name_of(empty))
    postgres.ask("INSERT INTO keys VALUES ('somebody else''s')", name_of(empty))
    with pytest.raises(CannotCopy, match=rf"{name_of(empty)}.* is not empty \(there are rows in keys\): make another"):
        copy_database(data, empty)
    assert postgres.ask(MADE, name_of(empty)) == [("keys",)]
    held = postgres.database()
    with closing(open_database(held)), pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(controlplane.postgres, "_SESSION", waiting_for_locks("20ms"))
        with pytest.raises(CannotCopy, match="another control plane writes to this database"):
            copy_database(data, held)
    copy_database(data, held)
    postgres.drop(held)


@pytest.mark.parametrize("lost", Lost)
def test_cut_at_its_end(
    postgres: PostgresServer, empty: PostgresPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Lost
) -> None:
    """What was not committed has done nothing, and the same again does it; what was is done, though nobody heard it."""
    data = filled(tmp_path)
    with Wire(postgres.directory) as wire:

        def last(connection: Connection) -> Soundness:
            wire.lose = lost
            return soundness_of(connection)

        monkeypatch.setattr(database_copy, "soundness_of", last)
        place = wire.place(name_of(empty))
        if lost is Lost.ORDER:
            with pytest.raises(CannotCopy, match=r"postgresql://"):
                copy_database(data, place)
            assert postgres.ask("SELECT count(*) FROM tenants", name_of(empty)) == [(0,)]
            monkeypatch.undo()
        assert copy_database(data, place).sound
    with disposing(reading_engine(empty)) as engine, engine.connect() as connection:
        assert everything(connection) == in_file(data)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda rows: rows[1:], id="a row is lost"),
        pytest.param(lambda rows: [(*rows[0][:-1], rows[0][-1] + 1)], id="a figure is another one"),
        pytest.param(None, id="the control: nothing is"),
    ],
)
def test_what_comes_out_otherwise_is_noticed(
    empty: PostgresPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], Any] | None
) -> None:
    """Also of rows that are in no chain."""
    data = filled(tmp_path)

    def spoiled(connection: Connection, table: Table, rows: Any) -> None:
        insert_rows(connection, table, spoil(rows) if spoil is not None and table is schema.grants else rows)

    monkeypatch.setattr(database_copy, "insert_rows", spoiled)
    if spoil is None:
        assert copy_database(data, empty).rows > 0
        return
    with pytest.raises(CannotCopy, match="grants came out as something else"):
        copy_database(data, empty)


def test_where_there_is_none(postgres: PostgresServer, tmp_path: Path) -> None:
    """A directory without a file, in which none is made, and a database that is not there."""
    with pytest.raises(CannotCopy, match=r"holds no kelvin\.db"):
        copy_database(tmp_path, postgres.place("postgres"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CannotCopy, match=r'database "none" does not exist'):
        copy_database(filled(tmp_path), postgres.place("none"))
