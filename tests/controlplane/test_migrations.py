"""A database gets each step once, in order, whole or not at all; a newer one is refused; the result is the schema."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, inspect, text

from contracts.control import Scope
from controlplane import schema
from controlplane.dialects import in_byte_order
from controlplane.feed import FeedHub
from controlplane.keys import KeyStore
from controlplane.migrations import STEPS, Migration, NewerDatabase, migrate
from controlplane.store import Database
from controlplane.tenants import TenantStore
from tests.controlplane.backends import Backend


@pytest.fixture
def engine(backend: Backend, tmp_path: Path) -> Engine:
    return backend.engine(tmp_path)


def _shape(engine: Engine, table: str) -> dict[str, object]:
    found = inspect(engine)
    columns = {column["name"]: (str(column["type"]), column["nullable"]) for column in found.get_columns(table)}
    foreign = sorted(
        (tuple(key["constrained_columns"]), key["referred_table"], tuple(key["referred_columns"]))
        for key in found.get_foreign_keys(table)
    )
    return {"columns": columns, "primary": found.get_pk_constraint(table)["constrained_columns"], "foreign": foreign}


def _expected(table: str, backend: Backend, path: Path) -> dict[str, object]:
    fresh = backend.engine(path)
    schema.metadata.create_all(fresh)
    in_byte_order(fresh, schema.metadata.tables)
    return _shape(fresh, table)


@pytest.mark.parametrize("table", sorted(schema.metadata.tables))
def test_the_steps_lead_to_the_schema(backend: Backend, engine: Engine, tmp_path: Path, table: str) -> None:
    """What the frozen DDL makes is what the code's tables say, column for column."""
    migrate(engine)
    assert _shape(engine, table) == _expected(table, backend, tmp_path / "fresh")


def test_a_forgotten_step_is_noticed(backend: Backend, engine: Engine, tmp_path: Path) -> None:
    """Negative control: with a column that no step makes, the comparison above goes red."""
    migrate(engine)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE models DROP COLUMN grace_s"))
    assert _shape(engine, "models") != _expected("models", backend, tmp_path / "fresh")


def test_each_step_runs_once(engine: Engine) -> None:
    """A second start finds nothing to do."""
    ran: list[int] = []
    steps = [Migration(1, "one", lambda _: ran.append(1)), Migration(2, "two", lambda _: ran.append(2))]
    migrate(engine, steps[:1])
    migrate(engine, steps)
    migrate(engine, steps)
    assert ran == [1, 2]


def test_a_step_that_fails_leaves_nothing(engine: Engine) -> None:
    """DDL is inside the transaction: half a step is no step, and the next start tries it again."""

    def breaks(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE half (x INTEGER)"))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        migrate(engine, [Migration(1, "breaks", breaks)])
    assert "half" not in inspect(engine).get_table_names()
    migrate(engine)
    assert "models" in inspect(engine).get_table_names()


def test_a_newer_database_is_refused(engine: Engine) -> None:
    """An older program does not touch what it does not know."""
    migrate(engine, [*STEPS, Migration(len(STEPS) + 1, "future", lambda _: None)])
    with pytest.raises(NewerDatabase, match=f"at schema {len(STEPS) + 1}"):
        migrate(engine)


def test_a_database_of_before_tenants_is_taken_over(engine: Engine) -> None:
    """Both keys stay good under names of their own; the one that administered becomes the operators' first."""
    migrate(engine, STEPS[:1])
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO tenants VALUES ('default', 5)"))
        for key_id, scopes in (("aaaaaaaaaaaa", "admin"), ("bbbbbbbbbbbb", "infer")):
            row = {"id": key_id, "sha": key_id * 4, "scopes": scopes}
            connection.execute(text("INSERT INTO keys VALUES (:id, 'default', :sha, :scopes, 6)"), row)
    database = Database(engine)
    feed = FeedHub()

    async def start() -> None:
        tenants, keys = TenantStore(database, feed), KeyStore(database, feed)
        await keys.bootstrap(Path("/nowhere"), 7)  # makes no key: there are two
        await tenants.load(7)
        assert [(key.name, key.scopes) for key in await keys.of_tenant("default", 7)] == [
            ("admin", (Scope.ADMIN, Scope.OPERATOR)),
            ("default", (Scope.INFER,)),
        ]
        assert [(each.tenant, each.state) for each in await tenants.all(7)] == [("default", "active")]

    asyncio.run(start())
    database.close()
    assert {(row.key_id, row.secret_sha256) for row in feed.snapshot().keys} == {
        (key_id, key_id * 4) for key_id in ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
    }
    assert [row.tenant for row in feed.snapshot().tenants] == ["default"]
