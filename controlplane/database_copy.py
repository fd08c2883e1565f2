"""`python -m controlplane.database_copy DATA URL [PASSWORD_FILE]`: DATA/kelvin.db into an empty PostgreSQL.

All of it in one transaction, which ends only when each row was compared and each chain verified as they lie there:
cut at any point, nothing has happened, and the same command does it.
"""

import argparse
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Table, inspect, literal, select, text
from sqlalchemy.exc import DBAPIError

from contracts.backup import CopiedTable, CopyReport
from contracts.settings import BadSetting
from controlplane import ledger_schema, schema
from controlplane.arrivals import insert_rows
from controlplane.ledger_migrations import NewerLedger, ensure_ledger
from controlplane.migrations import NewerDatabase, migrate
from controlplane.postgres_columns import unhurried
from controlplane.postgres_place import BadPlace, PostgresPlace, parse_place
from controlplane.program import reporting
from controlplane.store import disposing, open_database, reading_engine, streamed
from controlplane.verify import Soundness, soundness_of
from service.private import keep_secrets

FILE: Final = "kelvin.db"
TABLES: Final = (*schema.metadata.sorted_tables, *ledger_schema.metadata.sorted_tables)
_ROWS: Final = 2_000  # at a time


class CannotCopy(Exception):
    """Nothing was copied; the text says why."""


def copy_database(data: Path, place: PostgresPlace, *, accept_unsound: bool = False) -> CopyReport:
    """Copy what a stopped installation has in its file, which is brought to this program's schema as at any start, and
    otherwise stays as it is. Raises CannotCopy.
    """
    from controlplane.postgres import Postgres  # its driver is an extra

    began_ns = time.monotonic_ns()
    if not (data / FILE).is_file():
        raise CannotCopy(f"{data} holds no {FILE}")
    with _told(str(place)):
        # Before anything is made there: a name that was mistyped may be somebody else's database.
        with disposing(reading_engine(place)) as engine, engine.connect() as connection:
            _check_empty(connection, place)
        with closing(open_database(data / FILE)) as source, closing(Postgres(place, 1)) as target:
            migrate(target.writing)
            ensure_ledger(target.writing)
            with source.engine.begin() as rows:  # with its write lock: who comes now changes nothing
                work = partial(_copy, rows, place, accept_unsound)
                tables, found = target.commit(work, repeated=False)
    return CopyReport(
        database=str(place),
        tables=tables,
        chains=found.ledger,
        audits=found.audits,
        took_us=(time.monotonic_ns() - began_ns) // 1000,
    )


@contextmanager
def _told(where: str) -> Iterator[None]:
    """What a database says there, as a reason. No value of a row is in it."""
    try:
        yield
    except (NewerDatabase, NewerLedger, BadSetting) as refused:
        raise CannotCopy(str(refused)) from refused
    except DBAPIError as error:
        primary = getattr(getattr(error.orig, "diag", None), "message_primary", None)  # psycopg's: others have values
        why = primary or (str(error.orig).strip().splitlines() or ["it can't be used"])[0]
        raise CannotCopy(f"{FILE if isinstance(error.orig, sqlite3.Error) else where}: {why}") from error


def _check_empty(connection: Connection, place: PostgresPlace) -> None:
    there = set(inspect(connection).get_table_names())
    for table in TABLES:
        if table.name in there and connection.execute(select(literal(1)).select_from(table).limit(1)).first():
            rule = f"{place} is not empty (there are rows in {table.name}): make another database for it"
            raise CannotCopy(f"{rule}, or drop this one and make it anew")


def _copy(
    source: Connection, place: PostgresPlace, accept_unsound: bool, target: Connection
) -> tuple[tuple[CopiedTable, ...], Soundness]:
    unhurried(target)
    target.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))  # while the file is read
    _check_empty(target, place)  # nobody else writes there now
    # Rows whose words were let go come as they are, which is no way of adding to an audit.
    target.execute(text(f"ALTER TABLE {schema.audit.name} DISABLE TRIGGER USER"))
    copied = tuple(CopiedTable(table=str(table.name), rows=_copy_table(source, target, table)) for table in TABLES)
    target.execute(text(f"ALTER TABLE {schema.audit.name} ENABLE TRIGGER USER"))
    for table in TABLES:
        _compare(source, target, table)
    found = soundness_of(target)
    if found.fault is not None and not accept_unsound:
        raise CannotCopy(found.fault)
    return copied, found


def _copy_table(source: Connection, target: Connection, table: Table) -> int:
    """How many rows there are."""
    count = 0
    with _told(table.name), source.execute(select(table).execution_options(yield_per=_ROWS)) as found:
        for some in found.partitions():
            insert_rows(target, table, [tuple(row) for row in some])
            count += len(some)
    return count


def _compare(source: Connection, target: Connection, table: Table) -> None:
    """Row by row, in the order of their keys."""
    query = select(table).order_by(*table.primary_key)
    for one, other in zip_longest(streamed(source, query, _ROWS), streamed(target, query, _ROWS)):
        if one is None or other is None or tuple(one) != tuple(other):
            raise CannotCopy(f"{table.name} came out as something else")


def main(arguments: Sequence[str] | None = None) -> int:
    """The report as JSON on standard output, or one line on standard error and exit status 1."""
    keep_secrets()
    parser = argparse.ArgumentParser(prog="python -m controlplane.database_copy")
    parser.add_argument("data", type=Path)
    parser.add_argument("url")
    parser.add_argument("password_file", type=Path, nargs="?")
    parser.add_argument("--accept-unsound", action="store_true")
    given = parser.parse_args(arguments)
    return reporting(lambda: _copied(given.data, given.url, given.password_file, given.accept_unsound), CannotCopy)


def _copied(data: Path, url: str, password_file: Path | None, accept_unsound: bool) -> CopyReport:
    try:
        place = parse_place(url, password_file)
    except BadPlace as bad:
        raise CannotCopy(f"--to: {bad}") from bad
    return copy_database(data, place, accept_unsound=accept_unsound)


if __name__ == "__main__":
    sys.exit(main())
