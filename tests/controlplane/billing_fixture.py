"""Ledgers for billing tests: a month that balances, prices, and functions that run the reports."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, insert, select
from sqlalchemy.engine import Engine
from sqlalchemy.pool import StaticPool

from controlplane.billing.billing_report import CLOSING_DELAY_US, billing_report, close_month
from controlplane.db.ledger_migrations import ensure_ledger
from controlplane.db.ledger_schema import request_records
from controlplane.db.migrations import migrate
from controlplane.db.schema import models, tenants, versions
from controlplane.ledger.consistency_checks import ExternalFacts
from controlplane.ledger.policy.discrepancies import SpoolPosition
from controlplane.ledger.policy.month import day_us
from controlplane.ledger.policy.rating import DevicePrices, PriceBook, Prices
from controlplane.ledger.usage_ledger import Ledger, append_lifetimes, append_requests
from controlplane.ledger_check.ledger_verification import verify_ledger
from controlplane.ledger_check.usage_audit import reconcile
from kelvin.contracts.accounting.billing_reports import BillingReport, ClosingReport, ReconcileReport, VerifyReport
from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin, RequestRecord
from kelvin.contracts.serving.control_messages import RequestBatch
from tests.controlplane.usage_records import END_US, MONTH, lifetime_record, request_record

UsageRecord = RequestRecord | LifetimeRecord

# Written by a program with schema 1: good and bad months of two tenants, orphans, a conflict, an unused standby.
GOLDEN = Path(__file__).parents[1] / "golden" / "ledger_1.sql"


def prices(since: date, *, prompt: int = 1_000) -> Prices:
    return Prices(
        from_us=day_us(since),
        per_tokens=1_000,
        prompt=prompt,
        cached=100,
        completion=3_000,
        request=5,
        device={"*": DevicePrices(restore=20, active=40, idle=10)},
    )


POSITIONS = 1000  # most tokens that one request of the registered version can have
ORPHANED = request_record(
    2, origin=RecordOrigin.ORPHAN, source="rt-1", sequence=1, outcome="cancelled", status=499, completion_tokens=64
)
BOOK = PriceBook("EUR", (prices(date(2026, 1, 1)),))


def memory_ledger_engine() -> Engine:
    """Return an engine of an empty ledger in memory."""
    made = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    ensure_ledger(made)
    return made


def ledger_and_registry_engine(made: Engine | None = None) -> Engine:
    """Return a ledger beside a registry that knows the version of its records. By default it is in memory."""
    made = made or memory_ledger_engine()
    migrate(made)
    with made.begin() as connection:
        connection.execute(insert(tenants).values(tenant="acme", created_at_s=0, state="active"))
        model = {"tenant": "acme", "model": "m"}
        connection.execute(insert(models).values(**model, created_at_s=0))
        figures = dict.fromkeys(("weight_bytes", "total_bytes", "kv_bytes_per_token", "created_at_s"), 0)
        connection.execute(
            insert(versions).values(
                **model, **figures, version="f" * 64, state="ready", fault=None, limits="{}", architecture="a",
                max_positions=POSITIONS, kind="generate",
            )
        )  # fmt: skip
    return made


def enter(engine: Engine, records: Sequence[UsageRecord]) -> None:
    with engine.begin() as connection:
        append_requests(connection, [record for record in records if isinstance(record, RequestRecord)])
        append_lifetimes(connection, [record for record in records if isinstance(record, LifetimeRecord)])


def report(
    engine: Engine,
    *,
    tenant: str = "acme",
    month: str = MONTH,
    book: PriceBook = BOOK,
    live: set[str] | None = None,
    now_us: int = END_US,
) -> BillingReport:
    with engine.connect() as connection:
        return billing_report(connection, book, tenant, month, live=live, now_us=now_us)


def close(engine: Engine) -> ClosingReport:
    """Close the month of the tests, `CLOSING_DELAY_US` after its end."""
    with engine.begin() as connection:
        return close_month(connection, BOOK, "acme", MONTH, live=None, now_us=END_US + CLOSING_DELAY_US)


def verify(engine: Engine, tenant: str = "acme", month: str | None = None) -> VerifyReport:
    """Verify one month, or all of them."""
    with engine.connect() as connection:
        return verify_ledger(connection, tenant, month)


def run_usage_audit(
    engine: Engine,
    month: str | None = None,
    *,
    tenant: str = "acme",
    live: set[str] | None = None,
    now_us: int = END_US,
    spools: dict[str, SpoolPosition] | None = None,
) -> ReconcileReport:
    """Run the usage audit on one month, or on all of them."""
    with engine.connect() as connection:
        return reconcile(connection, tenant, month, ExternalFacts(BOOK, live or set(), now_us, spools or {}))


def good_month() -> list[UsageRecord]:
    """Return the records of two replicas with two requests each, one shed request, and an orphan record of a known
    request.
    """
    return [
        request_record(1, runtime_id="rt-1", device_us=1_000_000),
        request_record(2, runtime_id="rt-1", device_us=900_000, prompt_tokens=1000, cached_tokens=0),
        request_record(3, runtime_id="rt-2", outcome="cancelled", status=499, completion_tokens=0),
        request_record(4, runtime_id="rt-2", outcome="replica_lost", status=502, completion_tokens=3),
        request_record(5, runtime_id=None, outcome="overloaded", status=503, prompt_tokens=0, cached_tokens=0,
                       completion_tokens=0, device_us=0),
        request_record(4, origin=RecordOrigin.ORPHAN, source="rt-2", sequence=1, runtime_id="rt-2",
                       completion_tokens=64),
        lifetime_record(1, runtime_id="rt-1", requests=2),
        lifetime_record(2, runtime_id="rt-2", requests=2, device_class="cpu-2"),
    ]  # fmt: skip


def requests(*records: RequestRecord) -> RequestBatch:
    return RequestBatch(records=records)


async def rows(ledger: Ledger, table: Any) -> list[dict[str, Any]]:
    return await ledger.database.read(
        lambda connection: [dict(row) for row in connection.execute(select(table)).mappings()]
    )


async def charged_records(ledger: Ledger) -> dict[str, tuple[str, int]]:
    """Return (origin, completion tokens) of the billed record of each request."""
    found = await rows(ledger, request_records)
    return {row["request_id"]: (row["origin"], row["completion_tokens"]) for row in found if row["stands"]}
