"""Define the ledger's tables: usage records as they arrived, chained, and the totals that bills are made of.

A record is never deleted or rewritten, and its place in the chain never changes. While its month is open, only its
columns `stands` (it is charged) and `replaces` may change. `ledger_migrations.py` creates the tables.
"""

from typing import Final

from sqlalchemy import BigInteger, Boolean, Column, ColumnElement, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()


def _chain_columns() -> list[Column[object]]:
    """Return the columns of a row's place in its tenant's chain of a month. Rows of all kinds are numbered together."""
    return [
        Column("month", String(7), nullable=False),  # YYYY-MM in which the row is booked
        Column("link", BigInteger, nullable=False),  # 1, 2, 3, ...
        Column("chain", String(64), nullable=False),  # the digest of this row and all before it
    ]


request_records = Table(
    "ledger_requests",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("request_id", String(128), primary_key=True),
    Column("origin", String(16), primary_key=True),
    Column("orphan_of", String(128), primary_key=True),  # runtime that wrote an orphan record; empty for an activator's
    Column("source", String(128), nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("model", String(127), nullable=False),  # M, or OWNER/M
    Column("version", String(64)),
    Column("key_id", String(64), nullable=False),
    Column("runtime_id", String(128)),
    Column("started_at_us", BigInteger, nullable=False),
    Column("ended_at_us", BigInteger, nullable=False),
    Column("queued_us", BigInteger, nullable=False),
    Column("outcome", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("device_us", BigInteger, nullable=False),
    Column("timeline", Text),  # JSON of a list of stamps
    Column("stands", Boolean, nullable=False),
    Column("billable", Boolean, nullable=False),
    *_chain_columns(),
    Column("replaces", String(145)),  # "origin:orphan_of" of the closed month's record whose charge is taken back
    Column("once", String(64)),  # idempotency key: requests with the same key are charged once
    Column("degraded", String(160)),  # degradation step that was applied
    Index("ledger_requests_by_link", "tenant", "month", "link", unique=True),
)
_orphans = request_records.c.origin == "orphan"
Index(
    "ledger_requests_of_orphans",
    request_records.c.tenant,
    request_records.c.month,
    sqlite_where=_orphans,
    postgresql_where=_orphans,
)
_once = request_records.c.once
Index(
    "ledger_requests_by_once",
    request_records.c.tenant,
    _once,
    sqlite_where=_once.is_not(None),
    postgresql_where=_once.is_not(None),
)

lifetime_records = Table(
    "ledger_lifetimes",
    metadata,
    Column("runtime_id", String(128), primary_key=True),
    Column("source", String(128), nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("tenant", String(63)),
    Column("model", String(63)),
    Column("version", String(64)),
    Column("device_class", String(64), nullable=False),
    Column("born_at_us", BigInteger, nullable=False),
    Column("died_at_us", BigInteger, nullable=False),
    Column("total_us", BigInteger, nullable=False),
    Column("standby_us", BigInteger, nullable=False),
    Column("restore_us", BigInteger, nullable=False),
    Column("active_us", BigInteger, nullable=False),
    Column("idle_us", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("exit_status", Integer, nullable=False),
    Column("cpu_us", BigInteger, nullable=False),
    Column("max_rss_kb", BigInteger, nullable=False),
    *_chain_columns(),
    Index("ledger_lifetimes_by_link", "tenant", "month", "link", unique=True),
)

# Last reports of running replicas of pods. A row is deleted when the record of the whole life arrives. It is not a
# usage record, so it is in no chain.
open_lives = Table(
    "ledger_open_lives",
    metadata,
    Column("runtime_id", String(128), primary_key=True),
    Column("tenant", String(63), nullable=False),
    Column("told_at_us", BigInteger, nullable=False),  # time of the report, by our clock
    Column("died_at_us", BigInteger, nullable=False),  # end of the reported time, by the pod's clock
    Column("record", Text, nullable=False),  # JSON of a LifetimeRecord
    Index("ledger_open_lives_by_word", "told_at_us"),
)

# Sequences that arrived from a source, as ranges. A healthy source has one range, however many records it sent.
received = Table(
    "ledger_received",
    metadata,
    Column("source", String(128), primary_key=True),
    Column("first", BigInteger, primary_key=True),
    Column("last", BigInteger, nullable=False),
)

sources = Table(
    "ledger_sources",
    metadata,
    Column("source", String(128), primary_key=True),
    Column("first_at_us", BigInteger, nullable=False),  # earliest and latest end among its records
    Column("last_at_us", BigInteger, nullable=False),
)

conflicts = Table(
    "ledger_conflicts",
    metadata,
    Column("digest", String(64), primary_key=True),  # of the record, so that a repeat is not another conflict
    Column("tenant", String(63)),
    Column("subject", String(300), nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("record", Text, nullable=False),
    *_chain_columns(),
    Index("ledger_conflicts_by_link", "tenant", "month", "link", unique=True),
)

# The end of each chain. The platform's own chain (standbys that died unused) has the tenant "".
chains = Table(
    "ledger_chains",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("month", String(7), primary_key=True),
    Column("links", BigInteger, nullable=False),
    Column("chain", String(64), nullable=False),
)

# The last row of a closed month's chain: its frozen prices and bill.
closings = Table(
    "ledger_closings",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("closed_at_us", BigInteger, nullable=False),
    Column("prices", Text, nullable=False),  # JSON of a price book
    Column("report", Text, nullable=False),  # JSON of a BillingReport
    Column("month", String(7), primary_key=True),
    Column("link", BigInteger, nullable=False),
    Column("chain", String(64), nullable=False),
)

# Bills are made of these totals: a row per day, model and outcome, however many requests there were.
request_totals = Table(
    "ledger_request_totals",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("month", String(7), primary_key=True),  # in which the requests are booked
    Column("day", Integer, primary_key=True),  # day of their end since 1970 (UTC), because prices change at midnight
    Column("model", String(127), primary_key=True),
    Column("outcome", String(64), primary_key=True),
    Column("billable", Boolean, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
)

# Counts of the degraded requests among them.
step_totals = Table(
    "ledger_step_totals",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("month", String(7), primary_key=True),
    Column("day", Integer, primary_key=True),
    Column("step", String(16), primary_key=True),  # as in kelvin/contracts/serving/degradation_steps.py
    Column("requests", BigInteger, nullable=False),
)

device_totals = Table(
    "ledger_device_totals",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("month", String(7), primary_key=True),
    Column("day", Integer, primary_key=True),  # of death
    Column("model", String(63), primary_key=True),
    Column("device_class", String(64), primary_key=True),
    Column("lifetimes", BigInteger, nullable=False),
    Column("restore_us", BigInteger, nullable=False),
    Column("active_us", BigInteger, nullable=False),
    Column("idle_us", BigInteger, nullable=False),
)

# Totals of a tenant's requests at a replica in all months, for comparison with the replica's lifetime record.
runtime_totals = Table(
    "ledger_runtime_totals",
    metadata,
    Column("runtime_id", String(128), primary_key=True),
    Column("tenant", String(63), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("answered", BigInteger, nullable=False),  # requests that used device time or delivered tokens
    Column("device_us", BigInteger, nullable=False),
    Column("first_at_us", BigInteger, nullable=False),  # earliest and latest end
    Column("last_at_us", BigInteger, nullable=False),
    Column("owner", String(63)),  # tenant of the replica, if it is another one
    Index("ledger_runtime_totals_by_end", "tenant", "last_at_us"),
)
_guests = runtime_totals.c.owner.is_not(None)
Index(
    "ledger_runtime_totals_of_guests",
    runtime_totals.c.owner,
    runtime_totals.c.last_at_us,
    sqlite_where=_guests,
    postgresql_where=_guests,
)

IN_USE: Final = 0  # id of the row whose position is the number of the journal in use (0: none); never a journal's id
UNKNOWN: Final = -1  # number in that row if the restored backup doesn't say which journal was in use
journal_position = Table(
    "ledger_journal",
    metadata,
    Column("id", Integer, primary_key=True),  # the journal's number, or IN_USE; without a row it is unknown
    Column("position", BigInteger, nullable=False),  # its last entry at the last committed transaction
)

# Columns that a digest covers, in this order. A released list is never edited. A request's `digested_marks` come last.
REQUEST_VALUES: Final = tuple(column for column in request_records.c if column.name in (
    "tenant", "request_id", "origin", "orphan_of", "source", "sequence", "model", "version", "key_id", "runtime_id",
    "started_at_us", "ended_at_us", "queued_us", "outcome", "status", "stream", "prompt_tokens", "cached_tokens",
    "completion_tokens", "device_us", "timeline",
))  # fmt: skip
LIFETIME_VALUES: Final = tuple(column for column in lifetime_records.c if column.name in (
    "runtime_id", "source", "sequence", "pid", "tenant", "model", "version", "device_class", "born_at_us",
    "died_at_us", "total_us", "standby_us", "restore_us", "active_us", "idle_us", "requests", "exit_status", "cpu_us",
    "max_rss_kb",
))  # fmt: skip
CONFLICT_VALUES: Final = tuple(column for column in conflicts.c if column.name in (
    "digest", "tenant", "subject", "at_us", "reason", "record",
))  # fmt: skip
CLOSING_VALUES: Final = tuple(column for column in closings.c if column.name in (
    "tenant", "closed_at_us", "prices", "report",
))  # fmt: skip


def digested_marks(once: str | None, degraded: str | None) -> tuple[str | None, ...]:
    """Return the values of a request that its digest covers beyond REQUEST_VALUES. They are empty if it has neither."""
    if degraded is not None:
        return once, degraded
    return () if once is None else (once,)


def owned_by(table: Table, tenant: str) -> ColumnElement[bool]:
    """Select the tenant's rows; for "" those of the platform."""
    return table.c.tenant == tenant if tenant or not table.c.tenant.nullable else table.c.tenant.is_(None)
