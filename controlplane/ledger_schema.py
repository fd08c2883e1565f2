"""The ledger's tables: usage records as they came, in the registry's database but with a schema number of their own.

Nothing is ever deleted or rewritten here; only which of several records of one request stands (is charged) may change.
"""

from typing import Final

from sqlalchemy import BigInteger, Boolean, Column, Engine, Index, Integer, MetaData, String, Table, Text, text

LEDGER_SCHEMA: Final = 1

metadata = MetaData()

request_records = Table(
    "ledger_requests",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("request_id", String(128), primary_key=True),
    Column("origin", String(16), primary_key=True),
    Column("orphan_of", String(128), primary_key=True),  # the runtime that wrote it; empty for an activator's
    Column("source", String(128), nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("model", String(63), nullable=False),
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
    Index("ledger_requests_by_end", "tenant", "ended_at_us"),
    # All that a balance asks of a replica, so that it reads nothing but the index.
    Index("ledger_requests_by_runtime", "runtime_id", "tenant", "request_id", "device_us"),
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
    Index("ledger_lifetimes_by_end", "tenant", "died_at_us"),
)

# Which sequences of a source arrived, as ranges: a healthy source has one, however many records it sent.
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
    Column("first_at_us", BigInteger, nullable=False),  # earliest and latest end of what it recorded
    Column("last_at_us", BigInteger, nullable=False),
)

conflicts = Table(
    "ledger_conflicts",
    metadata,
    Column("digest", String(64), primary_key=True),  # SHA-256 of the record: a repeat is not another conflict
    Column("tenant", String(63)),
    Column("subject", String(300), nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("record", Text, nullable=False),
    Index("ledger_conflicts_by_end", "tenant", "at_us"),
)


class NewerLedger(RuntimeError):
    """A newer program wrote this ledger."""


def ensure_ledger(engine: Engine) -> None:
    """Make the tables where they are missing. Raises NewerLedger where another version of them is there."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS ledger_schema (number INTEGER PRIMARY KEY)"))
        found = connection.execute(text("SELECT MAX(number) FROM ledger_schema")).scalar_one()
        if found is None:
            metadata.create_all(connection)
            connection.execute(text("INSERT INTO ledger_schema (number) VALUES (:number)"), {"number": LEDGER_SCHEMA})
        elif found != LEDGER_SCHEMA:
            raise NewerLedger(f"the ledger has schema {found}; this program knows {LEDGER_SCHEMA}")
