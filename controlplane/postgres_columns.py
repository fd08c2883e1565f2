"""What PostgreSQL needs of columns that SQLite has anyway: texts in the order of their bytes."""

from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection, Engine, bindparam, text

_OTHERWISE: Final = text(
    "SELECT table_name, column_name, data_type, character_maximum_length FROM information_schema.columns "
    "WHERE table_schema = current_schema() AND table_name IN :tables "
    "AND data_type IN ('text', 'character varying') AND collation_name IS DISTINCT FROM 'C' ORDER BY 1, 2"
).bindparams(bindparam("tables", expanding=True))


def unhurried(connection: Connection) -> None:
    """A step of a migration takes as long as it takes."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))


def in_byte_order(engine: Engine, tables: Collection[str]) -> None:
    """What sorts by a column of these tables has the same order in every database, whatever its locale."""
    if engine.dialect.name != "postgresql":
        return
    with engine.begin() as connection:
        unhurried(connection)
        for table, column, kind, length in connection.execute(_OTHERWISE, {"tables": sorted(tables)}).all():
            limit = "" if length is None else f"({length})"
            connection.execute(text(f'ALTER TABLE {table} ALTER COLUMN {column} TYPE {kind}{limit} COLLATE "C"'))
