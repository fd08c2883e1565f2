"""Insert, or change what is there: ON CONFLICT has one form in SQLite and PostgreSQL, and a construct of each's own."""

from collections.abc import Callable, Mapping

from sqlalchemy import Executable, Table
from sqlalchemy.dialects import postgresql, sqlite

Insert = sqlite.Insert | postgresql.Insert


def upserts(table: Table, made: Callable[[Insert], Executable]) -> Mapping[str, Executable]:
    """The statement by a dialect's name."""
    return {"sqlite": made(sqlite.insert(table)), "postgresql": made(postgresql.insert(table))}
