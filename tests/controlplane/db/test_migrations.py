"""Migrations run once, in order and atomically, and produce the schema. A newer database is refused.

A migrated file of the first program and a new PostgreSQL have the same tables.
"""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, inspect, select, text
from sqlalchemy.exc import IntegrityError

from controlplane.db import ledger_schema, schema
from controlplane.db.database import Database, disposing, sqlite_engine
from controlplane.db.dialects import ensure_c_collation
from controlplane.db.ledger_migrations import ensure_ledger
from controlplane.db.migrations import STEPS, Migration, NewerDatabase, migrate
from controlplane.db.postgres import Postgres
from controlplane.db.postgres_url import PostgresUrl
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.key_store import KeyStore
from controlplane.registry.policy.domain import Model
from controlplane.registry.registry import Registry
from controlplane.registry.tenant_store import TenantStore
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.serving.control_messages import Scope, TenantLimits
from kelvin.contracts.serving.degradation_steps import CapOutput, Fallback
from kelvin.contracts.wire import encode
from tests.controlplane.billing_fixture import GOLDEN
from tests.controlplane.database_backends import DatabaseBackend


@pytest.fixture
def engine(backend: DatabaseBackend, tmp_path: Path) -> Engine:
    return backend.engine(tmp_path)


def _shape(engine: Engine, table: str) -> dict[str, Any]:
    found = inspect(engine)
    columns = {column["name"]: (str(column["type"]), column["nullable"]) for column in found.get_columns(table)}
    foreign = sorted(
        (tuple(key["constrained_columns"]), key["referred_table"], tuple(key["referred_columns"]))
        for key in found.get_foreign_keys(table)
    )
    return {"columns": columns, "primary": found.get_pk_constraint(table)["constrained_columns"], "foreign": foreign}


def _expected(table: str, backend: DatabaseBackend, path: Path) -> dict[str, Any]:
    fresh = backend.engine(path)
    schema.metadata.create_all(fresh)
    ensure_c_collation(fresh, schema.metadata.tables)
    return _shape(fresh, table)


@pytest.mark.parametrize("table", sorted(schema.metadata.tables))
def test_migrations_produce_the_schema(backend: DatabaseBackend, engine: Engine, tmp_path: Path, table: str) -> None:
    """The tables equal those of the code, column by column."""
    migrate(engine)
    assert _shape(engine, table) == _expected(table, backend, tmp_path / "fresh")


def test_a_missing_column_is_noticed(backend: DatabaseBackend, engine: Engine, tmp_path: Path) -> None:
    """Negative control: without one column, the comparison above fails."""
    migrate(engine)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE models DROP COLUMN scale"))
    assert _shape(engine, "models") != _expected("models", backend, tmp_path / "fresh")


def test_each_step_runs_once(engine: Engine) -> None:
    """A second start runs no migration."""
    ran: list[int] = []
    steps = [Migration(1, "one", lambda _: ran.append(1)), Migration(2, "two", lambda _: ran.append(2))]
    migrate(engine, steps[:1])
    migrate(engine, steps)
    migrate(engine, steps)
    assert ran == [1, 2]


def test_a_step_that_fails_leaves_nothing(engine: Engine) -> None:
    """DDL runs inside the transaction. The next start tries the step again."""

    def breaks(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE half (x INTEGER)"))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        migrate(engine, [Migration(1, "breaks", breaks)])
    assert "half" not in inspect(engine).get_table_names()
    migrate(engine)
    assert "models" in inspect(engine).get_table_names()


def test_a_newer_database_is_refused(engine: Engine) -> None:
    migrate(engine, [*STEPS, Migration(len(STEPS) + 1, "future", lambda _: None)])
    with pytest.raises(NewerDatabase, match=f"at schema {len(STEPS) + 1}"):
        migrate(engine)


_BEFORE_SETTINGS = (
    "INSERT INTO tenants (tenant, created_at_s, state) VALUES ('plain', 5, 'active')",
    "INSERT INTO tenants (tenant, created_at_s, state, store_bytes, requests, body_bytes, rpm, tpm, context_tokens, "
    "output_tokens, budget_micros, weight, priority, plan, deadline_max_s) VALUES ('acme', 5, 'active', 0, 2, 4096, "
    "60, 1125899906842624, 2, 3, 0, 1000, 'batch', 'free', 9)",
    "INSERT INTO models (tenant, model, created_at_s, min_replicas, max_replicas, window_s, grace_s) "
    "VALUES ('plain', 'chat', 6, 0, 1, 60, 30)",
    "INSERT INTO models (tenant, model, created_at_s, min_replicas, max_replicas, target, window_s, grace_s, idle, "
    "wait_price, average, backlog_s, split, ladder, plan_ladders) VALUES ('acme', 'chat', 6, 1, 4, 0.5, 6, 0, 'auto', "
    "7, 'weighted', 2.5, :split, :ladder, :plans)",
    "INSERT INTO models (tenant, model, created_at_s, min_replicas, max_replicas, window_s, grace_s, plan_ladders) "
    "VALUES ('acme', 'free', 6, 0, 1, 60, 30, :plans)",
)


async def test_a_database_of_before_json_settings_keeps_them(engine: Engine) -> None:
    """Limits, scale settings, splits and degradation steps keep their values, set or not. No old column remains."""
    migrate(engine, STEPS[:18])
    split = {"a" * 64: 9, "b" * 64: 1}
    steps = (CapOutput(tokens=8), Fallback(model="small", wait_s=2.5))
    values = {"split": encode(split).decode(), "ladder": encode(steps).decode()}
    values["plans"] = encode({"free": steps[:1], "pro": ()}).decode()
    with engine.begin() as connection:
        for statement in _BEFORE_SETTINGS:
            connection.execute(text(statement), values)
    migrate(engine)
    database, feed = Database(engine), FeedHub()
    registry = Registry(database, feed)
    await registry.load()
    await TenantStore(database, feed).load(7)
    found = {(model.tenant, model.model): model for model in registry.all_models()}
    assert found["plain", "chat"] == Model("plain", "chat", 6)
    assert found["acme", "free"].plan_ladders == found["acme", "chat"].plan_ladders
    assert found["acme", "chat"] == Model(
        "acme", "chat", 6, split=split, ladder=steps, plan_ladders={"free": steps[:1], "pro": ()},
        scale=ScaleSettings(
            min=1, max=4, target=0.5, window_s=6.0, grace_s=0.0, idle="auto", wait_price=7, average="weighted",
            backlog_s=2.5,
        ),
    )  # fmt: skip
    database.close()
    limits = {row.tenant: row.limits for row in feed.snapshot().tenants}
    assert limits["plain"] == TenantLimits()
    assert limits["acme"] == TenantLimits(
        store_bytes=0, requests=2, body_bytes=4096, rpm=60, tpm=MAX_LIMIT, context_tokens=2, output_tokens=3,
        budget_micros=0, weight=1000, priority="batch", plan="free", deadline_max_s=9,
    )  # fmt: skip


_REFERRING = (
    "INSERT INTO keys (key_id, tenant, secret_sha256, scopes, created_at_s) VALUES ('k', 'acme', 's', 'infer', 5)",
    "INSERT INTO versions (tenant, model, version, state, limits, architecture, weight_bytes, total_bytes, "
    "kv_bytes_per_token, max_positions, created_at_s) VALUES ('acme', 'chat', 'v', 'ready', '{}', 'a', 1, 1, 1, 1, 6)",
    "INSERT INTO aliases (tenant, model, alias, version) VALUES ('acme', 'chat', 'prod', 'v')",
    "INSERT INTO grants (tenant, model, grantee, created_at_s) VALUES ('acme', 'chat', 'plain', 6)",
)


def test_sqlite_that_cannot_drop_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result has the same tables and rows, and foreign keys still hold."""
    new, old = sqlite_engine(tmp_path / "new.db"), sqlite_engine(tmp_path / "old.db")
    for engine in (new, old):
        migrate(engine, STEPS[:18])
        with engine.begin() as connection:
            for statement in (*_BEFORE_SETTINGS, *_REFERRING):
                connection.execute(text(statement), {"split": None, "ladder": None, "plans": '{"free":[]}'})
    migrate(new)
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))

    @event.listens_for(old, "before_cursor_execute")
    def _refuse(_: Connection, __: object, statement: str, *___: object) -> None:
        if "DROP COLUMN" in statement:
            raise sqlite3.OperationalError('near "DROP": syntax error')

    migrate(old)
    assert inspect(old).get_table_names() == inspect(new).get_table_names()
    for table in schema.metadata.sorted_tables:
        assert _shape(old, table.name) == _shape(new, table.name)
        with old.connect() as one, new.connect() as other:
            assert one.execute(select(table)).all() == other.execute(select(table)).all()
    with old.connect() as connection:
        assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
    for statement in ("DELETE FROM tenants WHERE tenant = 'plain'", "DELETE FROM models WHERE model = 'chat'"):
        with pytest.raises(IntegrityError), old.begin() as connection:
            connection.execute(text(statement))


async def test_a_database_of_before_tenants_is_taken_over(engine: Engine) -> None:
    """Both keys stay valid and get names. The admin key becomes the first operator key."""
    migrate(engine, STEPS[:1])
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO tenants VALUES ('default', 5)"))
        for key_id, scopes in (("aaaaaaaaaaaa", "admin"), ("bbbbbbbbbbbb", "infer")):
            row = {"id": key_id, "sha": key_id * 4, "scopes": scopes}
            connection.execute(text("INSERT INTO keys VALUES (:id, 'default', :sha, :scopes, 6)"), row)
    database = Database(engine)
    feed = FeedHub()
    tenants, keys = TenantStore(database, feed), KeyStore(database, feed)
    await keys.bootstrap(Path("/nowhere"), 7)  # creates no key: there are two
    await tenants.load(7)
    assert [(key.name, key.scopes) for key in await keys.tenant_keys("default", 7)] == [
        ("admin", (Scope.ADMIN, Scope.OPERATOR)),
        ("default", (Scope.INFER,)),
    ]
    assert [(each.tenant, each.state) for each in await tenants.all_tenants(7)] == [("default", "active")]
    database.close()
    assert {(row.key_id, row.secret_sha256) for row in feed.snapshot().keys} == {
        (key_id, key_id * 4) for key_id in ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
    }
    assert [row.tenant for row in feed.snapshot().tenants] == ["default"]


TABLES = sorted({*schema.metadata.tables, *ledger_schema.metadata.tables})
_KINDS = {"DOUBLE PRECISION": "FLOAT", "DOUBLE_PRECISION": "FLOAT"}  # different names of the same type


def shape_in_both(engine: Engine, table: str) -> dict[str, Any]:
    """Return columns, keys and indices. SQLite ignores lengths, so they are left out."""
    found = _shape(engine, table)
    kinds = {
        name: (re.sub(r"\(\d+\)| COLLATE .*", "", kind), nullable)
        for name, (kind, nullable) in found["columns"].items()
    }
    indices = sorted(
        (str(each["name"]), tuple(each["column_names"]), bool(each["unique"]))
        for each in inspect(engine).get_indexes(table)
    )
    columns = {name: (_KINDS.get(kind, kind), nullable) for name, (kind, nullable) in kinds.items()}
    return {**found, "columns": columns, "indices": indices}


def brought_forward(path: Path) -> Engine:
    """Return the migrated ledger of an old program, with rows."""
    with closing(sqlite3.connect(path)) as old:
        old.executescript(GOLDEN.read_text())
    engine = sqlite_engine(path)
    migrate(engine)
    ensure_ledger(engine)
    return engine


def test_sqlite_and_postgres_have_the_same_tables(place: PostgresUrl, tmp_path: Path) -> None:
    """Names, columns, nullability, keys and indices are the same. Negative control: a changed column is noticed."""
    postgres = Postgres(place, 1)
    with closing(postgres), disposing(brought_forward(tmp_path / "kelvin.db")) as old:
        there = {*inspect(postgres.writing).get_table_names()} - {
            "writers"
        }  # only PostgreSQL has it: the writers' numbers
        assert there == {*inspect(old).get_table_names()} == {*TABLES, "schema_version", "ledger_schema"}
        for table in TABLES:
            assert shape_in_both(postgres.writing, table) == shape_in_both(old, table), table
        with postgres.writing.begin() as connection:
            connection.execute(text("ALTER TABLE models ALTER COLUMN scale DROP NOT NULL"))
        assert shape_in_both(postgres.writing, "models") != shape_in_both(old, "models")


@pytest.mark.parametrize("table", ["ledger_requests", "ledger_request_totals"])
def test_a_column_that_was_too_short_is_widened(place: PostgresUrl, table: str) -> None:
    """This concerns PostgreSQL, which enforces lengths. A granted model is OWNER/MODEL."""
    postgres = Postgres(place, 1)
    with closing(postgres):
        with postgres.writing.begin() as connection:
            connection.execute(text(f"ALTER TABLE {table} ALTER COLUMN model TYPE VARCHAR(63)"))
            connection.execute(text("DELETE FROM ledger_schema WHERE number > 6"))
            connection.execute(text("DROP TABLE ledger_step_totals"))  # from a later step
        ensure_ledger(postgres.writing)
        kinds = {column["name"]: column["type"] for column in inspect(postgres.writing).get_columns(table)}
        assert str(kinds["model"]).startswith("VARCHAR(127)")
