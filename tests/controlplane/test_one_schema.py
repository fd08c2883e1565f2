"""A file of the first program, brought forward, and a fresh PostgreSQL have the same tables."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, inspect, text

from controlplane import ledger_schema, schema
from controlplane.ledger_migrations import ensure_ledger
from controlplane.migrations import migrate
from controlplane.postgres import Postgres
from controlplane.postgres_place import PostgresPlace
from controlplane.store import disposing, sqlite_engine
from tests.controlplane.test_ledger_migrations import GOLDEN

TABLES = sorted({*schema.metadata.tables, *ledger_schema.metadata.tables})
# What each calls the same kind of column. A length is a remark in SQLite.
_KINDS = {"DOUBLE PRECISION": "FLOAT", "DOUBLE_PRECISION": "FLOAT"}


def shape(engine: Engine, table: str) -> dict[str, Any]:
    """Columns with their kinds, which of them may be empty, keys and indices."""
    found = inspect(engine)
    columns = {}
    for column in found.get_columns(table):
        kind = re.sub(r"\(\d+\)| COLLATE .*", "", str(column["type"]))
        columns[column["name"]] = (_KINDS.get(kind, kind), column["nullable"])
    foreign = sorted(
        (tuple(key["constrained_columns"]), key["referred_table"], tuple(key["referred_columns"]))
        for key in found.get_foreign_keys(table)
    )
    indices = sorted(
        (str(each["name"]), tuple(each["column_names"]), bool(each["unique"])) for each in found.get_indexes(table)
    )
    primary = found.get_pk_constraint(table)["constrained_columns"]
    return {"columns": columns, "primary": primary, "foreign": foreign, "indices": indices}


def brought_forward(path: Path) -> Engine:
    """As an old program left it, with rows in it."""
    with closing(sqlite3.connect(path)) as old:
        old.executescript(GOLDEN.read_text())
    engine = sqlite_engine(path)
    migrate(engine)
    ensure_ledger(engine)
    return engine


def test_both_have_the_same_tables(place: PostgresPlace, tmp_path: Path) -> None:
    """By name; columns, what may be empty, keys and indices. Control: a column less is noticed."""
    postgres = Postgres(place, 1)
    with closing(postgres), disposing(brought_forward(tmp_path / "kelvin.db")) as old:
        there = {*inspect(postgres.writing).get_table_names()} - {"writers"}  # PostgreSQL's alone: who writes
        assert there == {*inspect(old).get_table_names()} == {*TABLES, "schema_version", "ledger_schema"}
        for table in TABLES:
            assert shape(postgres.writing, table) == shape(old, table), table
        with postgres.writing.begin() as connection:
            connection.execute(text("ALTER TABLE models ALTER COLUMN scale DROP NOT NULL"))
        assert shape(postgres.writing, "models") != shape(old, "models")


@pytest.mark.parametrize("table", ["ledger_requests", "ledger_request_totals"])
def test_a_column_that_was_too_short_is_widened(place: PostgresPlace, table: str) -> None:
    """In PostgreSQL, where it matters: a granted model is OWNER/M."""
    postgres = Postgres(place, 1)
    with closing(postgres):
        with postgres.writing.begin() as connection:
            connection.execute(text(f"ALTER TABLE {table} ALTER COLUMN model TYPE VARCHAR(63)"))
            connection.execute(text("DELETE FROM ledger_schema WHERE number > 6"))
            connection.execute(text("DROP TABLE ledger_step_totals"))  # of a later step
        ensure_ledger(postgres.writing)
        kinds = {column["name"]: column["type"] for column in inspect(postgres.writing).get_columns(table)}
        assert str(kinds["model"]).startswith("VARCHAR(127)")
