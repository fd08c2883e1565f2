"""Migrate the ledger forward. Its steps have numbers of their own, because its tables only share a file with the
registry.

As in `migrations.py`, a released step is never edited and runs once, whole or not at all. A newer ledger is refused.
"""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, Engine, Table, bindparam, select, text, update

from controlplane.db.chained_log import ChainWriter
from controlplane.db.dialects import disable_statement_timeout, ensure_c_collation
from controlplane.db.hash_chain_policy import RowKind
from controlplane.db.ledger_schema import (
    CONFLICT_VALUES,
    LIFETIME_VALUES,
    REQUEST_VALUES,
    conflicts,
    lifetime_records,
    metadata,
    request_records,
)
from controlplane.db.migrations import Migration
from controlplane.ledger.policy.month import month_of

_ROWS: Final = 2_000


class NewerLedger(RuntimeError):
    """A newer program wrote this ledger."""


def _records(connection: Connection) -> None:
    """Create the tables of records, and of received sequences."""
    for statement in (
        "CREATE TABLE ledger_requests (tenant VARCHAR(63) NOT NULL, request_id VARCHAR(128) NOT NULL, "
        "origin VARCHAR(16) NOT NULL, orphan_of VARCHAR(128) NOT NULL, source VARCHAR(128) NOT NULL, "
        "sequence BIGINT NOT NULL, model VARCHAR(63) NOT NULL, version VARCHAR(64), key_id VARCHAR(64) NOT NULL, "
        "runtime_id VARCHAR(128), started_at_us BIGINT NOT NULL, ended_at_us BIGINT NOT NULL, "
        "queued_us BIGINT NOT NULL, outcome VARCHAR(64) NOT NULL, status INTEGER NOT NULL, stream BOOLEAN NOT NULL, "
        "prompt_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL, completion_tokens BIGINT NOT NULL, "
        "device_us BIGINT NOT NULL, timeline TEXT, stands BOOLEAN NOT NULL, billable BOOLEAN NOT NULL, "
        "PRIMARY KEY (tenant, request_id, origin, orphan_of))",
        "CREATE INDEX ledger_requests_by_end ON ledger_requests (tenant, ended_at_us)",
        "CREATE INDEX ledger_requests_by_runtime ON ledger_requests (runtime_id, tenant, request_id, device_us)",
        "CREATE TABLE ledger_lifetimes (runtime_id VARCHAR(128) NOT NULL, source VARCHAR(128) NOT NULL, "
        "sequence BIGINT NOT NULL, pid INTEGER NOT NULL, tenant VARCHAR(63), model VARCHAR(63), version VARCHAR(64), "
        "device_class VARCHAR(64) NOT NULL, born_at_us BIGINT NOT NULL, died_at_us BIGINT NOT NULL, "
        "total_us BIGINT NOT NULL, standby_us BIGINT NOT NULL, restore_us BIGINT NOT NULL, active_us BIGINT NOT NULL, "
        "idle_us BIGINT NOT NULL, requests BIGINT NOT NULL, exit_status INTEGER NOT NULL, cpu_us BIGINT NOT NULL, "
        "max_rss_kb BIGINT NOT NULL, PRIMARY KEY (runtime_id))",
        "CREATE INDEX ledger_lifetimes_by_end ON ledger_lifetimes (tenant, died_at_us)",
        "CREATE TABLE ledger_received (source VARCHAR(128) NOT NULL, first BIGINT NOT NULL, last BIGINT NOT NULL, "
        "PRIMARY KEY (source, first))",
        "CREATE TABLE ledger_sources (source VARCHAR(128) NOT NULL, first_at_us BIGINT NOT NULL, "
        "last_at_us BIGINT NOT NULL, PRIMARY KEY (source))",
        "CREATE TABLE ledger_conflicts (digest VARCHAR(64) NOT NULL, tenant VARCHAR(63), "
        "subject VARCHAR(300) NOT NULL, at_us BIGINT NOT NULL, reason TEXT NOT NULL, record TEXT NOT NULL, "
        "PRIMARY KEY (digest))",
        "CREATE INDEX ledger_conflicts_by_end ON ledger_conflicts (tenant, at_us)",
    ):
        connection.execute(text(statement))


def _chains(connection: Connection) -> None:
    """Create chains and totals from existing records, and the table of closings. Drop indices no longer needed."""
    chained = ("month VARCHAR(7) NOT NULL DEFAULT ''", "link BIGINT NOT NULL DEFAULT 0",
               "chain VARCHAR(64) NOT NULL DEFAULT ''")  # fmt: skip
    tables = ("ledger_requests", "ledger_lifetimes", "ledger_conflicts")
    for table in tables:
        for column in chained:
            connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {column}"))
    for statement in (
        "ALTER TABLE ledger_requests ADD COLUMN replaces VARCHAR(145)",
        "CREATE TABLE ledger_chains (tenant VARCHAR(63) NOT NULL, month VARCHAR(7) NOT NULL, links BIGINT NOT NULL, "
        "chain VARCHAR(64) NOT NULL, PRIMARY KEY (tenant, month))",
        "CREATE TABLE ledger_closings (tenant VARCHAR(63) NOT NULL, closed_at_us BIGINT NOT NULL, "
        "prices TEXT NOT NULL, report TEXT NOT NULL, month VARCHAR(7) NOT NULL, link BIGINT NOT NULL, "
        "chain VARCHAR(64) NOT NULL, PRIMARY KEY (tenant, month))",
        "CREATE TABLE ledger_request_totals (tenant VARCHAR(63) NOT NULL, month VARCHAR(7) NOT NULL, "
        "day INTEGER NOT NULL, model VARCHAR(63) NOT NULL, outcome VARCHAR(64) NOT NULL, billable BOOLEAN NOT NULL, "
        "requests BIGINT NOT NULL, prompt_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL, "
        "completion_tokens BIGINT NOT NULL, PRIMARY KEY (tenant, month, day, model, outcome, billable))",
        "CREATE TABLE ledger_device_totals (tenant VARCHAR(63) NOT NULL, month VARCHAR(7) NOT NULL, "
        "day INTEGER NOT NULL, model VARCHAR(63) NOT NULL, device_class VARCHAR(64) NOT NULL, "
        "lifetimes BIGINT NOT NULL, restore_us BIGINT NOT NULL, active_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, "
        "PRIMARY KEY (tenant, month, day, model, device_class))",
        "CREATE TABLE ledger_runtime_totals (runtime_id VARCHAR(128) NOT NULL, tenant VARCHAR(63) NOT NULL, "
        "requests BIGINT NOT NULL, answered BIGINT NOT NULL, device_us BIGINT NOT NULL, first_at_us BIGINT NOT NULL, "
        "last_at_us BIGINT NOT NULL, PRIMARY KEY (runtime_id, tenant))",
        "CREATE INDEX ledger_runtime_totals_by_end ON ledger_runtime_totals (tenant, last_at_us)",
    ):
        connection.execute(text(statement))
    links = ChainWriter(connection)
    _chain(
        connection, links, request_records, RowKind.REQUEST, [column.name for column in REQUEST_VALUES], "ended_at_us"
    )
    lifetime_values = [column.name for column in LIFETIME_VALUES]
    _chain(connection, links, lifetime_records, RowKind.LIFETIME, lifetime_values, "died_at_us")
    _chain(connection, links, conflicts, RowKind.CONFLICT, [column.name for column in CONFLICT_VALUES], "at_us")
    links.write()
    for statement in (
        "INSERT INTO ledger_request_totals SELECT tenant, month, ended_at_us / 86400000000, model, outcome, billable, "
        "COUNT(*), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens) FROM ledger_requests "
        "WHERE stands GROUP BY 1, 2, 3, 4, 5, 6",
        "INSERT INTO ledger_device_totals SELECT tenant, month, died_at_us / 86400000000, COALESCE(model, ''), "
        "device_class, COUNT(*), SUM(restore_us), SUM(active_us), SUM(idle_us) FROM ledger_lifetimes "
        "WHERE tenant IS NOT NULL GROUP BY 1, 2, 3, 4, 5",
        "INSERT INTO ledger_runtime_totals SELECT runtime_id, tenant, COUNT(*), "
        "SUM(CASE WHEN device_us > 0 OR tokens > 0 THEN 1 ELSE 0 END), SUM(device_us), MIN(first_us), MAX(last_us) "
        "FROM (SELECT runtime_id, tenant, MAX(device_us) AS device_us, MAX(completion_tokens) AS tokens, "
        "MIN(ended_at_us) AS first_us, MAX(ended_at_us) AS last_us FROM ledger_requests WHERE runtime_id IS NOT NULL "
        "GROUP BY runtime_id, tenant, request_id) AS each_request GROUP BY 1, 2",
        "DROP INDEX ledger_requests_by_end",
        "DROP INDEX ledger_requests_by_runtime",
        "DROP INDEX ledger_lifetimes_by_end",
        "DROP INDEX ledger_conflicts_by_end",
        "CREATE INDEX ledger_requests_of_orphans ON ledger_requests (tenant, month) WHERE origin = 'orphan'",
        *(f"CREATE UNIQUE INDEX {table}_by_link ON {table} (tenant, month, link)" for table in tables),
    ):
        connection.execute(text(statement))


def _guests(connection: Connection) -> None:
    """Add the owner of a replica that served another tenant. Until now there was no such request."""
    for statement in (
        "ALTER TABLE ledger_runtime_totals ADD COLUMN owner VARCHAR(63)",
        "CREATE INDEX ledger_runtime_totals_of_guests ON ledger_runtime_totals (owner, last_at_us) "
        "WHERE owner IS NOT NULL",
    ):
        connection.execute(text(statement))


def _chain(
    connection: Connection, links: ChainWriter, table: Table, kind: RowKind, values: list[str], end: str
) -> None:
    """Link the rows in the order of their ends, in batches. Rows with link 0 are not linked yet."""
    names = [column.name for column in table.primary_key]
    same = [table.c[name] == bindparam(f"of_{name}") for name in names]
    place = update(table).where(*same).values(
        month=bindparam("new_month"), link=bindparam("new_link"), chain=bindparam("new_chain")
    )  # fmt: skip
    columns = [table.c[name] for name in values]
    connection.execute(text(f"CREATE INDEX ledger_unchained ON {table.name} (link, {end})"))
    while True:
        rows = connection.execute(
            select(*columns).where(table.c.link == 0).order_by(table.c[end], *table.primary_key).limit(_ROWS)
        ).mappings()
        placed = []
        for row in rows:
            month = month_of(row[end])
            link, chain = links.add((row["tenant"] or "", month), (kind, *(row[name] for name in values)))
            found = {"new_month": month, "new_link": link, "new_chain": chain}
            placed.append({f"of_{name}": row[name] for name in names} | found)
        if not placed:
            break
        connection.execute(place, placed)
    connection.execute(text("DROP INDEX ledger_unchained"))


def _once(connection: Connection) -> None:
    """Add the idempotency key. Existing records have none, so their digests stay as they are."""
    connection.execute(text("ALTER TABLE ledger_requests ADD COLUMN once VARCHAR(64)"))
    connection.execute(
        text("CREATE INDEX ledger_requests_by_once ON ledger_requests (tenant, once) WHERE once IS NOT NULL")
    )


def _degraded(connection: Connection) -> None:
    """Add the degradation step. Existing records have none, so their digests stay as they are."""
    connection.execute(text("ALTER TABLE ledger_requests ADD COLUMN degraded VARCHAR(160)"))


def _open_lives(connection: Connection) -> None:
    """Create the table of running replicas' last reports."""
    for statement in (
        "CREATE TABLE ledger_open_lives (runtime_id VARCHAR(128) NOT NULL, tenant VARCHAR(63) NOT NULL, "
        "told_at_us BIGINT NOT NULL, died_at_us BIGINT NOT NULL, record TEXT NOT NULL, PRIMARY KEY (runtime_id))",
        "CREATE INDEX ledger_open_lives_by_word ON ledger_open_lives (told_at_us)",
    ):
        connection.execute(text(statement))


def _granted_models(connection: Connection) -> None:
    """Make room for OWNER/M, the name of another tenant's model. SQLite does not enforce lengths."""
    if connection.dialect.name == "postgresql":
        for table in ("ledger_requests", "ledger_request_totals"):
            connection.execute(text(f"ALTER TABLE {table} ALTER COLUMN model TYPE VARCHAR(127)"))


def _step_totals(connection: Connection) -> None:
    """Count degraded requests by step, without those whose charge was taken back."""
    for statement in (
        "CREATE TABLE ledger_step_totals (tenant VARCHAR(63) NOT NULL, month VARCHAR(7) NOT NULL, "
        "day INTEGER NOT NULL, step VARCHAR(16) NOT NULL, requests BIGINT NOT NULL, "
        "PRIMARY KEY (tenant, month, day, step))",
        "INSERT INTO ledger_step_totals SELECT tenant, month, ended_at_us / 86400000000, "
        "CASE WHEN SUBSTR(degraded, 1, 11) = 'cap-output=' THEN 'cap-output' "
        "WHEN SUBSTR(degraded, 1, 12) = 'fallback-of=' THEN 'fallback' "
        "WHEN SUBSTR(degraded, 1, 7) = 'cached=' THEN 'cached' ELSE 'other' END, SUM(sign) FROM "
        "(SELECT tenant, month, ended_at_us, degraded, 1 AS sign FROM ledger_requests WHERE stands "
        "UNION ALL SELECT it.tenant, it.month, other.ended_at_us, other.degraded, -1 FROM ledger_requests AS it "
        "JOIN ledger_requests AS other ON other.tenant = it.tenant AND other.request_id = it.request_id "
        "AND other.origin || ':' || other.orphan_of = it.replaces WHERE it.stands) AS counted "
        "WHERE degraded IS NOT NULL GROUP BY 1, 2, 3, 4 HAVING SUM(sign) <> 0",
    ):
        connection.execute(text(statement))


def _no_empty_totals(connection: Connection) -> None:
    """Delete totals that are zero. Earlier programs kept such rows, and verification called a sound ledger unsound."""
    for statement in (
        "DELETE FROM ledger_request_totals WHERE requests = 0 AND prompt_tokens = 0 AND cached_tokens = 0 "
        "AND completion_tokens = 0",
        "DELETE FROM ledger_step_totals WHERE requests = 0",
    ):
        connection.execute(text(statement))


def _journal_position(connection: Connection) -> None:
    """Create the table of the journal's position at the last commit. It is unknown until the next transaction."""
    table = "ledger_journal (id INTEGER NOT NULL, position BIGINT NOT NULL, PRIMARY KEY (id))"
    connection.execute(text(f"CREATE TABLE IF NOT EXISTS {table}"))


STEPS: Final[Sequence[Migration]] = (
    Migration(1, "records", _records),
    Migration(2, "chains", _chains),
    Migration(3, "once", _once),
    Migration(4, "guests", _guests),
    Migration(5, "degraded", _degraded),
    Migration(6, "open lives", _open_lives),
    Migration(7, "granted models", _granted_models),
    Migration(8, "step totals", _step_totals),
    Migration(9, "no empty totals", _no_empty_totals),
    Migration(10, "journal position", _journal_position),
)


def ensure_ledger(engine: Engine, steps: Sequence[Migration] = STEPS) -> None:
    """Apply missing steps. Raises NewerLedger."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS ledger_schema (number INTEGER PRIMARY KEY)"))
        done = connection.execute(text("SELECT COALESCE(MAX(number), 0) FROM ledger_schema")).scalar_one()
    if done > len(steps):
        raise NewerLedger(f"the ledger has schema {done}; this program knows {len(steps)}")
    for step in steps[done:]:
        with engine.begin() as connection:
            disable_statement_timeout(connection)
            step.apply(connection)
            connection.execute(text("INSERT INTO ledger_schema (number) VALUES (:number)"), {"number": step.number})
    ensure_c_collation(engine, metadata.tables)
