"""Hide differences between SQLite's and PostgreSQL's SQL: upserts, collation, statement timeouts, DROP COLUMN."""

import sqlite3
from collections.abc import Callable, Collection, Mapping
from typing import Final

from sqlalchemy import Connection, Engine, Executable, Table, bindparam, text
from sqlalchemy.dialects import postgresql, sqlite

Insert = sqlite.Insert | postgresql.Insert

_OTHER_COLLATIONS: Final = text(
    "SELECT table_name, column_name, data_type, character_maximum_length FROM information_schema.columns "
    "WHERE table_schema = current_schema() AND table_name IN :tables "
    "AND data_type IN ('text', 'character varying') AND collation_name IS DISTINCT FROM 'C' ORDER BY 1, 2"
).bindparams(bindparam("tables", expanding=True))


def upserts(table: Table, create_statement: Callable[[Insert], Executable]) -> Mapping[str, Executable]:
    """Return, by the dialect's name, a statement that inserts a row or changes the existing one."""
    return {"sqlite": create_statement(sqlite.insert(table)), "postgresql": create_statement(postgresql.insert(table))}


def disable_statement_timeout(connection: Connection) -> None:
    """Let the transaction's statements take any time, as steps of a migration may."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))


def drop_columns(connection: Connection, table: str, columns: Collection[str], create_statement: str) -> None:
    """Drop these columns of the table. `create_statement` is its CREATE TABLE without them.

    SQLite before 3.35 can't drop a column, so there the table is created again and its rows are copied back.
    """
    if connection.dialect.name == "postgresql" or sqlite3.sqlite_version_info >= (3, 35):
        for column in columns:
            connection.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
        return
    connection.execute(text("PRAGMA defer_foreign_keys = ON"))  # until the commit: other tables refer to these rows
    for statement in (f"CREATE TABLE {table}_before AS SELECT * FROM {table}", f"DROP TABLE {table}", create_statement):  # noqa: S608
        connection.execute(text(statement))
    columns_text = ", ".join(row.name for row in connection.execute(text(f"PRAGMA table_info({table})")))
    connection.execute(text(f"INSERT INTO {table} ({columns_text}) SELECT {columns_text} FROM {table}_before"))  # noqa: S608
    connection.execute(text(f"DROP TABLE {table}_before"))


def ensure_c_collation(engine: Engine, tables: Collection[str]) -> None:
    """Give these tables' text columns the collation "C", so that sorting does not depend on the database's locale."""
    if engine.dialect.name != "postgresql":
        return
    with engine.begin() as connection:
        disable_statement_timeout(connection)
        for table, column, kind, length in connection.execute(_OTHER_COLLATIONS, {"tables": sorted(tables)}).all():
            limit = "" if length is None else f"({length})"
            connection.execute(text(f'ALTER TABLE {table} ALTER COLUMN {column} TYPE {kind}{limit} COLLATE "C"'))
