"""Requests with one idempotency key are billed once, in any order of their records, and the ledger stays sound."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, select, text

from controlplane.backup.restore_program import replay
from controlplane.db.database import sqlite_engine
from controlplane.db.ledger_migrations import ensure_ledger
from controlplane.db.ledger_schema import request_records
from controlplane.ledger.ledger_journal import decode_entry, encode_entry
from controlplane.ledger.request_rows import known_requests
from controlplane.ledger.usage_ledger import append_requests, timeline_of
from controlplane.ledger_check.ledger_verification import verify_ledger
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from tests.controlplane.billing_fixture import (
    close,
    enter,
    good_month,
    ledger_and_registry_engine,
    memory_ledger_engine,
    report,
    run_usage_audit,
    verify,
)
from tests.controlplane.usage_records import HOUR_US, lifetime_record, request_record

DAY_US = 24 * HOUR_US
# One key, four requests: cancelled by its caller, lost with its activator (two records), answered, answered again.
CUT = request_record(21, outcome="cancelled", status=499, completion_tokens=3, once="k1")
ORPHAN = request_record(
    22, origin=RecordOrigin.ORPHAN, source="rt-1", sequence=1, outcome="cancelled", completion_tokens=64, once="k1"
)
LATE_OF_IT = request_record(22, outcome="replica_lost", status=502, completion_tokens=5, once="k1")
ANSWERED = request_record(23, completion_tokens=8, once="k1")
AGAIN = request_record(24, completion_tokens=8, once="k1")
OTHER = request_record(25, once="k2")
THEIRS = request_record(26, once="k1", tenant="other")
TOMORROW = request_record(27, once="k1", ended_at_us=ANSWERED.ended_at_us + 2 * DAY_US)
FAMILY = [CUT, ORPHAN, LATE_OF_IT, ANSWERED, AGAIN, OTHER, THEIRS, TOMORROW]


def standing(engine: Engine) -> set[str]:
    """Return the ids of the charged requests."""
    with engine.connect() as connection:
        rows = connection.execute(select(request_records.c.request_id).where(request_records.c.stands))
        return set(rows.scalars())


def bill(engine: Engine) -> object:
    """Return everything in the bill that the tenant pays for."""
    made = report(engine)
    return made.requests, made.lines, made.total_micros, made.completion_tokens


def test_requests_with_one_idempotency_key_are_billed_once() -> None:
    """Another key, another tenant and another day make another charge."""
    engine, alone = memory_ledger_engine(), memory_ledger_engine()
    enter(engine, FAMILY)
    enter(alone, [ANSWERED, OTHER, TOMORROW])
    assert standing(engine) == {f"req-{number}" for number in (23, 25, 26, 27)}
    assert bill(engine) == bill(alone)
    assert verify(engine).sound
    with engine.connect() as connection:
        for number in (21, 22, 23):  # each timeline can still be read
            assert timeline_of(connection, "acme", f"req-{number}") is not None
    engine.dispose()
    alone.dispose()


def test_degradation_of_a_request_is_stored_and_chained() -> None:
    """It is stored with and without an idempotency key, changes nothing in the bill, and cannot be changed later."""
    engine, plain = memory_ledger_engine(), memory_ledger_engine()
    records = [
        request_record(31, degraded="cap-output=64"),
        request_record(32, degraded="fallback-of=large", once="k1"),
        request_record(33, once="k2"),
        request_record(34),
    ]
    enter(engine, records)
    enter(engine, records)
    enter(plain, [msgspec.structs.replace(record, degraded=msgspec.UNSET) for record in records])
    with engine.connect() as connection:
        known = known_requests(connection, [("acme", record.request_id) for record in records])
    assert [booked.record for group in known.values() for booked in group] == records
    assert bill(engine) == bill(plain)
    assert verify(engine).sound
    for change in ("degraded = NULL WHERE degraded IS NOT NULL", "degraded = 'k2' WHERE request_id = 'req-34'"):
        with engine.connect() as connection:
            connection.execute(text(f"UPDATE ledger_requests SET {change}"))
            assert not verify_ledger(connection, "acme", None).sound, change
            connection.rollback()
    engine.dispose()
    plain.dispose()


def test_requests_without_a_key_are_each_billed() -> None:
    """Negative control: without keys both requests are billed."""
    engine = memory_ledger_engine()
    enter(engine, [request_record(number, completion_tokens=8) for number in (23, 24)])
    assert report(engine).requests == {"ok": 2}
    engine.dispose()


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=60)
def test_order_repeats_and_batches_do_not_change_a_bill(data: st.DataObject) -> None:
    """Nor do they change which records are charged. The ledger is sound in every case."""
    repeats = data.draw(st.lists(st.sampled_from(FAMILY), max_size=6))
    order: Sequence[RequestRecord] = data.draw(st.permutations([*FAMILY, *repeats]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(order)), max_size=5)))
    engine, plain = memory_ledger_engine(), memory_ledger_engine()
    for begin, end in zip([0, *cuts], [*cuts, len(order)], strict=True):
        with engine.begin() as connection:
            append_requests(connection, order[begin:end])
    enter(plain, FAMILY)
    assert (standing(engine), bill(engine)) == (standing(plain), bill(plain))
    for tenant in ("acme", "other"):
        assert verify(engine, tenant=tenant).sound, verify(engine, tenant=tenant)
    engine.dispose()
    plain.dispose()


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=40)
def test_key_is_charged_once_across_a_closed_month(data: st.DataObject) -> None:
    """The charge of the closed month stays. Later requests with the key cost nothing, and every chain holds."""
    family = [CUT, ANSWERED, AGAIN]
    order = data.draw(st.permutations(family))
    after = data.draw(st.integers(0, len(order)))
    engine = memory_ledger_engine()
    enter(engine, order[:after])
    close(engine)
    enter(engine, order[after:])
    assert len(standing(engine)) == 1
    assert verify(engine).sound, verify(engine)
    with engine.connect() as connection:
        charged = connection.execute(
            text("SELECT SUM(requests) FROM ledger_request_totals WHERE tenant = 'acme' AND billable")
        ).scalar_one()
    assert charged == 1
    engine.dispose()


def test_forged_second_charge_is_found(tmp_path: Path) -> None:
    """Verification recomputes which record is charged. The digest covers the key."""
    for number, statement in enumerate(
        (
            "UPDATE ledger_requests SET stands = 1 WHERE request_id = 'req-24'",
            "UPDATE ledger_requests SET once = NULL WHERE request_id = 'req-24'",
            "UPDATE ledger_requests SET once = 'k9' WHERE request_id = 'req-24'",
            "UPDATE ledger_requests SET once = 'k1' WHERE request_id = 'req-1'",
        )
    ):
        engine = sqlite_engine(tmp_path / f"{number}.db")
        ensure_ledger(engine)
        enter(engine, [request_record(1), *FAMILY])
        assert verify(engine).sound
        with engine.begin() as connection:
            connection.execute(text(statement))
        assert not verify(engine).sound, statement
        engine.dispose()


def test_forged_charge_with_forged_totals_is_found() -> None:
    """Verification compares each request that has a key with the others of the key, even if all figures agree."""
    engine = memory_ledger_engine()
    enter(engine, [ANSWERED, AGAIN])
    with engine.begin() as connection:
        connection.execute(text("UPDATE ledger_requests SET stands = 1"))
        figures = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        doubled = ", ".join(f"{name} = 2 * {name}" for name in figures)
        connection.execute(text(f"UPDATE ledger_request_totals SET {doubled}"))
    (difference,) = verify(engine).months[0].differences
    assert difference.detail == "which record of this request is charged is not what its records say"
    engine.dispose()


def test_usage_audit_agrees_for_repeated_requests() -> None:
    """The audit counts every request that a replica served, charged or not."""
    engine = ledger_and_registry_engine()
    begun = lifetime_record(9, runtime_id="rt-9", sequence=1, source="supervisor-9", requests=2)
    answered = request_record(1, source="activator-9", runtime_id="rt-9", request_id="one", once="k1")
    again = request_record(2, source="activator-9", runtime_id="rt-9", request_id="two", once="k1")
    enter(engine, [*good_month(), answered, again, begun])
    found = run_usage_audit(engine)
    assert (found.agrees, found.differences) == (True, ())
    with engine.begin() as connection:
        connection.execute(text("UPDATE ledger_request_totals SET requests = requests + 1 WHERE outcome = 'ok'"))
    assert not run_usage_audit(engine).agrees, "the control"
    engine.dispose()


def test_a_journal_makes_the_same_chains_again() -> None:
    """The replayed records come in one batch, the original ones did not."""
    first, second = memory_ledger_engine(), memory_ledger_engine()
    for record in [request_record(1), *FAMILY]:
        enter(first, [record])
    assert replay(second, [decode_entry(encode_entry(record)) for record in [request_record(1), *FAMILY]]) == 9
    for tenant in ("acme", "other"):
        assert verify(first, tenant=tenant) == verify(second, tenant=tenant)
    first.dispose()
    second.dispose()
