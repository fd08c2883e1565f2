"""The bill counts degraded requests by their step, and a step never costs money."""

import msgspec
import pytest
from sqlalchemy import Engine, text, update

from controlplane.db.hash_chain_policy import RowKind, digest_of
from controlplane.db.ledger_migrations import STEPS, ensure_ledger
from controlplane.db.ledger_schema import closings, step_totals
from controlplane.ledger.policy.booking import LedgerRecord, StepKey, step_sums
from kelvin.contracts.accounting.billing_reports import BillingReport
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from kelvin.contracts.wire import decode, encode
from tests.controlplane.billing_fixture import (
    UsageRecord,
    close,
    enter,
    memory_ledger_engine,
    report,
    run_usage_audit,
    verify,
)
from tests.controlplane.usage_records import BEGIN_US, HOUR_US, MONTH, lifetime_record, request_record

DAY = BEGIN_US // (24 * HOUR_US)
# The orphan record of a capped answer. The activator's record comes after the month was closed.
ORPHAN = request_record(6, origin=RecordOrigin.ORPHAN, source="rt-1", sequence=1, outcome="cancelled",
                        degraded="cap-output=64")  # fmt: skip
LATE = request_record(6, degraded="fallback-of=large")
RECORDS: list[UsageRecord] = [
    request_record(1, degraded="cap-output=64"),
    request_record(2, degraded="cap-output=8", model="other"),
    request_record(3, degraded="fallback-of=large"),
    request_record(4, degraded="cached=30", runtime_id=None, completion_tokens=0, device_us=0),
    request_record(5),
    ORPHAN,
    lifetime_record(1, runtime_id="rt-1", requests=5),
]
STEPS_OF_RECORDS = {"cached": 1, "cap-output": 3, "fallback": 1}


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """A ledger of a month with every step. One comes from an orphan record."""
    enter(engine, RECORDS)
    return engine


def kept(engine: Engine) -> list[tuple[object, ...]]:
    """Return the rows of the step totals."""
    with engine.connect() as connection:
        rows = connection.execute(step_totals.select().order_by(*step_totals.primary_key))
        return [tuple(row) for row in rows]


@pytest.mark.parametrize(
    ("degraded", "want"),
    [
        pytest.param("cap-output=64", "cap-output", id="a shorter answer"),
        pytest.param("fallback-of=large", "fallback", id="another model's answer"),
        pytest.param("fallback-of=large=2", "fallback", id="a model name with an equals sign"),
        pytest.param("cached=30", "cached", id="a cached answer"),
        pytest.param("cached", "other", id="a step without its value"),
        pytest.param("slower=2", "other", id="an unknown step"),
    ],
)
def test_a_record_is_counted_by_its_step(degraded: str, want: str) -> None:
    """The names are those of the metric. Unknown steps count as `other`."""
    booked = LedgerRecord(request_record(1, degraded=degraded), MONTH, stands=True)
    assert step_sums([booked]) == {StepKey("acme", MONTH, DAY, want): 1}


def test_uncharged_or_full_requests_are_not_counted() -> None:
    """Control: a full answer, and a record that is not charged."""
    whole = LedgerRecord(request_record(1), MONTH, stands=True)
    beside = LedgerRecord(request_record(1, degraded="cached=3"), MONTH, stands=False)
    assert step_sums([whole]) == step_sums([beside]) == {}


def test_the_bill_counts_each_step(engine: Engine) -> None:
    """A repeat changes nothing. Other months and tenants have no steps."""
    assert report(engine).degraded == STEPS_OF_RECORDS
    enter(engine, RECORDS)
    found = report(engine)
    assert (found.degraded, sum(found.requests.values())) == (STEPS_OF_RECORDS, 6)
    assert report(engine, tenant="other").degraded == report(engine, month="2026-12").degraded == {}
    assert verify(engine).sound
    assert not [each for each in run_usage_audit(engine, None).differences if each.kind == "total_wrong"]


def test_degradation_step_costs_nothing(engine: Engine) -> None:
    """The same requests without steps cost the same."""
    plain = memory_ledger_engine()
    records: list[UsageRecord] = [
        msgspec.structs.replace(each, degraded=msgspec.UNSET) if isinstance(each, RequestRecord) else each
        for each in RECORDS
    ]
    enter(plain, records)
    assert report(plain).degraded == {}
    assert msgspec.structs.replace(report(plain), degraded=STEPS_OF_RECORDS) == report(engine)


def test_a_correction_takes_its_step_back(engine: Engine) -> None:
    """A closed month keeps its counts. The correction is in no bill's step counts, and both months' totals verify."""
    close(engine)
    enter(engine, [LATE])
    assert report(engine).degraded == STEPS_OF_RECORDS
    assert report(engine, month="2026-12").degraded == {}
    assert [row for row in kept(engine) if row[1] != MONTH] == [
        ("acme", "2026-12", DAY, "cap-output", -1),
        ("acme", "2026-12", DAY, "fallback", 1),
    ]
    assert verify(engine).sound


def test_a_better_record_of_an_open_month_changes_the_step(engine: Engine) -> None:
    """The activator's record replaces the orphan record."""
    enter(engine, [LATE])
    assert report(engine).degraded == {"cached": 1, "cap-output": 2, "fallback": 2}
    assert verify(engine).sound


@pytest.mark.parametrize("is_corrected", [False, True])
def test_migration_counts_existing_degraded_requests(engine: Engine, is_corrected: bool) -> None:
    """The migration counts existing rows as the program does, corrections included."""
    if is_corrected:
        close(engine)
    enter(engine, [LATE])
    wanted = kept(engine)
    assert len(wanted) == (5 if is_corrected else 3)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE ledger_step_totals"))
        connection.execute(text("DELETE FROM ledger_schema WHERE number > 7"))
    ensure_ledger(engine)
    assert kept(engine) == wanted
    with engine.connect() as connection:
        numbers = connection.execute(text("SELECT number FROM ledger_schema")).scalars()
        assert sorted(numbers) == [step.number for step in STEPS]


TAMPERINGS = [
    pytest.param(
        "UPDATE ledger_step_totals SET requests = requests + 1 WHERE step = 'cached'", "cached", id="count too high"
    ),
    pytest.param("DELETE FROM ledger_step_totals WHERE step = 'fallback'", "fallback", id="row missing"),
    pytest.param(
        "INSERT INTO ledger_step_totals VALUES ('acme', '2026-11', 20758, 'other', 2)",
        "other",
        id="row without requests",
    ),
]


@pytest.mark.parametrize(("statement", "step"), TAMPERINGS)
def test_wrong_step_count_is_named(engine: Engine, statement: str, step: str) -> None:
    """`verify` names it, and `reconcile` names it with the number of requests."""
    with engine.begin() as connection:
        connection.execute(text(statement))
    (difference,) = verify(engine, month=MONTH).months[0].differences
    assert difference.subject == f"total of day {DAY}, {step}"
    (wrong,) = (each for each in run_usage_audit(engine, MONTH).differences if each.kind == "total_wrong")
    assert wrong.subject == f"{MONTH}: 2026-11-01, {step}"
    assert (wrong.requests, wrong.amount_micros) == (2 if step == "other" else 1, 0)


def test_month_closed_before_step_counts_is_sound(engine: Engine) -> None:
    """Its bill has no step counts and is still verified in all other fields."""
    close(engine)
    with engine.begin() as connection:
        row = connection.execute(closings.select()).mappings().one()
        bill = msgspec.structs.replace(decode(row["report"], BillingReport), degraded=msgspec.UNSET)
        old = encode(bill).decode()
        assert "degraded" not in old
        before = connection.execute(
            text("SELECT chain FROM ledger_requests WHERE month = :month UNION ALL SELECT chain FROM ledger_lifetimes "
                 "WHERE month = :month AND link = :last"), {"month": MONTH, "last": row["link"] - 1},
        ).scalars().all()[-1]  # fmt: skip
        values = [row["tenant"], row["closed_at_us"], row["prices"], old]
        chain = digest_of(bytes.fromhex(before), [RowKind.CLOSING, *values]).hex()
        connection.execute(update(closings).values(report=old, chain=chain))
        connection.execute(text("UPDATE ledger_chains SET chain = :chain WHERE month = :month"),
                           {"chain": chain, "month": MONTH})  # fmt: skip
    assert report(engine).degraded is msgspec.UNSET
    assert verify(engine).sound, verify(engine)
    with engine.begin() as connection:
        wrong = old.replace('"ok":5', '"ok":4')
        assert wrong != old
        connection.execute(update(closings).values(report=wrong))
    assert not verify(engine).sound
