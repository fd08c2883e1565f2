"""A ledger to bill from, a month in it that balances, and prices."""

from collections.abc import Sequence
from datetime import date

from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.pool import StaticPool

from contracts.billing import BillingReport
from contracts.usage import LifetimeRecord, Origin, RequestRecord
from controlplane.billing import billing_report
from controlplane.ledger import append_lifetimes, append_requests
from controlplane.ledger_migrations import ensure_ledger
from controlplane.policy.month import day_us
from controlplane.policy.rating import DevicePrices, PriceBook, Prices
from tests.controlplane.usage_records import END_US, MONTH, lifetime_record, request_record

Record = RequestRecord | LifetimeRecord


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


ORPHANED = request_record(
    2, origin=Origin.ORPHAN, source="rt-1", sequence=1, outcome="cancelled", status=499, completion_tokens=64
)
BOOK = PriceBook("EUR", (prices(date(2026, 1, 1)),))


def fresh_engine() -> Engine:
    made = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    ensure_ledger(made)
    return made


def enter(engine: Engine, records: Sequence[Record]) -> None:
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


def good_month() -> list[Record]:
    """Two replicas that served two requests each, one that was shed, one orphan's record beside an activator's."""
    return [
        request_record(1, runtime_id="rt-1", device_us=1_000_000),
        request_record(2, runtime_id="rt-1", device_us=900_000, prompt_tokens=1000, cached_tokens=0),
        request_record(3, runtime_id="rt-2", outcome="cancelled", status=499, completion_tokens=0),
        request_record(4, runtime_id="rt-2", outcome="replica_lost", status=502, completion_tokens=3),
        request_record(5, runtime_id=None, outcome="overloaded", status=503, prompt_tokens=0, cached_tokens=0,
                       completion_tokens=0, device_us=0),
        request_record(4, origin=Origin.ORPHAN, source="rt-2", sequence=1, runtime_id="rt-2", completion_tokens=64),
        lifetime_record(1, runtime_id="rt-1", requests=2),
        lifetime_record(2, runtime_id="rt-2", requests=2, device_class="cpu-2"),
    ]  # fmt: skip
