"""Verification finds and names every manual change of the ledger. A ledger that the product wrote is sound."""

import sqlite3
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, StaticPool, create_engine, text

from controlplane.db.hash_chain_policy import LEDGER, genesis
from controlplane.db.ledger_migrations import STEPS, ensure_ledger
from controlplane.ledger_check.ledger_verification import verify_all_chains
from kelvin.contracts.accounting.billing_reports import VerifyReport
from kelvin.contracts.accounting.usage import RecordOrigin
from tests.controlplane.billing_fixture import (
    UsageRecord,
    close,
    enter,
    good_month,
    memory_ledger_engine,
    run_usage_audit,
    verify,
)
from tests.controlplane.database_backends import SQLITE
from tests.controlplane.usage_records import END_US, HOUR_US, MONTH, lifetime_record, request_record

LATE = request_record(4, runtime_id="rt-2", outcome="ok", completion_tokens=70, source="activator-2", sequence=1)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """A closed month with a charged orphan record, a conflict and a late correction, and another month."""
    month = [record for record in good_month() if record != good_month()[3]]
    enter(engine, [*month, request_record(2, status=500, sequence=4), request_record(6, ended_at_us=END_US + HOUR_US)])
    close(engine)
    enter(
        engine, [LATE, lifetime_record(9, runtime_id="rt-9", requests=0), lifetime_record(3, tenant=None, model=None)]
    )
    return engine


def test_written_ledger_verifies(engine: Engine) -> None:
    """Both months of the tenant verify, and so do the platform's own records and a tenant without any."""
    found = verify(engine)
    assert (found.sound, [(each.month, each.closed, each.differences) for each in found.months]) == (
        True,
        [("2026-11", True, ()), ("2026-12", False, ())],
    )
    assert [each.links for each in found.months] == [9, 3]
    assert verify(engine, tenant="").sound
    assert verify(engine, tenant="nobody") == VerifyReport(tenant="nobody", sound=True, months=())
    assert verify(engine, month="2026-12").months == found.months[1:]


# Manual SQL statements, and the subject that verification must name.
TAMPERINGS = [
    pytest.param("UPDATE ledger_requests SET completion_tokens = 0 WHERE request_id = 'req-1'", "request req-1",
                 id="a figure of a request"),
    pytest.param("UPDATE ledger_requests SET tenant = 'other' WHERE request_id = 'req-2'", "request req-3",
                 id="a request given to another tenant"),
    pytest.param("UPDATE ledger_requests SET timeline = '[]' WHERE request_id = 'req-1'", "request req-1",
                 id="a timeline that was not there"),
    pytest.param("UPDATE ledger_lifetimes SET active_us = 1 WHERE runtime_id = 'rt-1'", "lifetime rt-1",
                 id="a life's device time"),
    pytest.param("UPDATE ledger_conflicts SET reason = 'none'", "conflict req-2 (activator-1#4)",
                 id="why a record was kept aside"),
    pytest.param("DELETE FROM ledger_requests WHERE request_id = 'req-2'", "request req-3", id="a request removed"),
    pytest.param("DELETE FROM ledger_lifetimes WHERE runtime_id = 'rt-1'", "lifetime rt-2", id="a life removed"),
    pytest.param("DELETE FROM ledger_conflicts", "lifetime rt-1", id="a conflict hidden"),
    pytest.param("DELETE FROM ledger_closings", "request req-4", id="a closing undone"),
    pytest.param("DELETE FROM ledger_requests WHERE month = '2026-12' AND request_id = 'req-4'", "lifetime rt-9",
                 id="a correction removed"),
    pytest.param("DELETE FROM ledger_lifetimes WHERE runtime_id = 'rt-9'", "end", id="the last row of a chain removed"),
    pytest.param("DELETE FROM ledger_requests; DELETE FROM ledger_lifetimes; DELETE FROM ledger_conflicts; "
                 "DELETE FROM ledger_closings", "end", id="everything removed"),
    pytest.param("INSERT INTO ledger_requests SELECT tenant, 'req-99', origin, orphan_of, source, 99, model, version, "
                 "key_id, runtime_id, started_at_us, ended_at_us, queued_us, outcome, status, stream, prompt_tokens, "
                 "cached_tokens, completion_tokens, device_us, timeline, stands, billable, month, 100, chain, "
                 "replaces, once, degraded FROM ledger_requests WHERE request_id = 'req-1'", "request req-99",
                 id="a request added at the end"),
    pytest.param("UPDATE ledger_requests SET link = -1 WHERE request_id = 'req-1'; "
                 "UPDATE ledger_requests SET link = 1 WHERE request_id = 'req-2'; "
                 "UPDATE ledger_requests SET link = 2 WHERE request_id = 'req-1'", "request req-2",
                 id="two requests swapped"),
    pytest.param("UPDATE ledger_requests SET month = '2026-12', link = 4 WHERE request_id = 'req-1'", "request req-2",
                 id="a request moved to another month"),
    pytest.param("UPDATE ledger_requests SET chain = lower(hex(zeroblob(32))) WHERE request_id = 'req-1'",
                 "request req-1", id="a digest"),
    pytest.param("UPDATE ledger_chains SET chain = lower(hex(zeroblob(32))) WHERE month = '2026-11'", "end",
                 id="the end of a chain"),
    pytest.param("DELETE FROM ledger_chains", "end", id="the ends of all chains"),
    pytest.param("UPDATE ledger_requests SET billable = 0 WHERE request_id = 'req-1'", "request req-1",
                 id="a request made free"),
    pytest.param("UPDATE ledger_requests SET stands = 0 WHERE request_id = 'req-4' AND origin = 'activator'",
                 "request req-4", id="a correction not charged"),
    pytest.param("UPDATE ledger_requests SET replaces = NULL WHERE request_id = 'req-4'", "request req-4",
                 id="a correction that takes nothing back"),
    pytest.param("UPDATE ledger_requests SET replaces = 'orphan:rt-7' WHERE request_id = 'req-4' "
                 "AND origin = 'activator'", "request req-4", id="a correction that takes back another record"),
    pytest.param("UPDATE ledger_request_totals SET completion_tokens = completion_tokens - 1 WHERE outcome = 'ok' "
                 "AND month = '2026-11'", "total of day 20758, m, ok, True", id="a total of requests"),
    pytest.param("DELETE FROM ledger_device_totals WHERE device_class = 'cpu-2'", "total of day 20758, m, cpu-2",
                 id="a total removed"),
    pytest.param("UPDATE ledger_runtime_totals SET requests = 9 WHERE runtime_id = 'rt-1'", "replica rt-1",
                 id="a total of a replica"),
    pytest.param("DELETE FROM ledger_runtime_totals WHERE runtime_id = 'rt-2'", "replica rt-2",
                 id="a replica's total removed"),
    pytest.param("INSERT INTO ledger_device_totals VALUES ('acme', '2026-11', 1, 'm', 'cpu-9', 0, 0, 0, 0)",
                 "total of day 1, m, cpu-9", id="a total without rows"),
    pytest.param("UPDATE ledger_closings SET report = replace(report, '\"completion_tokens\":78', "
                 "'\"completion_tokens\":77')", "closing 2026-11", id="the bill of a closed month"),
    pytest.param("UPDATE ledger_closings SET prices = replace(prices, '3000', '2000')", "closing 2026-11",
                 id="the prices of a closed month"),
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("backend", [SQLITE], indirect=True)
@pytest.mark.parametrize(("statements", "subject"), TAMPERINGS)
def test_every_change_by_hand_is_found(engine: Engine, statements: str, subject: str) -> None:
    """The first difference of a month is named, and other months are checked. A digest is the last valid link's."""
    raw = engine.raw_connection().driver_connection
    assert isinstance(raw, sqlite3.Connection)
    written = {(month, 0): genesis(LEDGER, "acme", month).hex() for month in (MONTH, "2026-12")}
    for table in ("requests", "lifetimes", "conflicts", "closings"):
        for month, link, chain in raw.execute(f"SELECT month, link, chain FROM ledger_{table} WHERE tenant = 'acme'"):
            written[month, link] = chain
    changed = raw.total_changes
    raw.executescript(statements)
    assert raw.total_changes > changed, "the statement did nothing"
    found = verify(engine)
    assert not found.sound
    named = [problem.subject for each in found.months for problem in each.differences]
    assert subject in [*named, *(problem.subject for problem in found.replicas)]
    for each in found.months:
        assert each.chain == written[each.month, each.links]


@pytest.mark.parametrize("backend", [SQLITE], indirect=True)
@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("UPDATE ledger_requests SET origin = 'x' WHERE month > '2026-11'", id="an unknown origin"),
        pytest.param("UPDATE ledger_requests SET timeline = '[' WHERE month > '2026-11'", id="an invalid timeline"),
        pytest.param("UPDATE ledger_requests SET link = 'x' WHERE request_id = 'req-1'", id="a text for a link"),
        pytest.param("UPDATE ledger_requests SET model = CAST(X'ff' AS TEXT)", id="bytes that are not text"),
    ],
)
def test_rows_that_no_program_writes_are_found(engine: Engine, statement: str) -> None:
    """Such a row may be read before its own link is checked: the late correction reads the orphan record."""
    with engine.begin() as connection:
        connection.execute(text(statement))
    found = verify(engine)
    assert not found.sound
    assert found.months[0].differences


@pytest.mark.parametrize("backend", [SQLITE], indirect=True)
def test_links_before_a_row_that_cannot_be_read_hold(engine: Engine) -> None:
    """SQLite returns no row of a fetch that contains an unreadable one."""
    with engine.begin() as connection:
        before = connection.execute(text("SELECT link, chain FROM ledger_requests WHERE request_id = 'req-1'")).one()
        connection.execute(text("UPDATE ledger_requests SET source = CAST(X'ff' AS TEXT) WHERE request_id = 'req-2'"))
    month = verify(engine, month=MONTH).months[0]
    assert (month.links, month.chain) == tuple(before)
    assert month.differences


@pytest.mark.parametrize("backend", [SQLITE], indirect=True)
@pytest.mark.parametrize(
    ("month", "name"),
    [
        pytest.param("X'ff'", r"\xff", id="bytes"),
        pytest.param("CAST(X'32ff' AS TEXT)", r"2\xff", id="bytes that are not text"),
        pytest.param("'2026-13'", "2026-13", id="month 13"),
    ],
)
def test_malformed_month_of_a_row_is_named(engine: Engine, month: str, name: str) -> None:
    """The name is readable even if the bytes are not text. The month that lost the row has a gap, and is named."""
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE ledger_requests SET month = {month} WHERE request_id = 'req-1'"))
    found = verify(engine)
    assert [(each.month, bool(each.differences)) for each in found.months] == [
        ("2026-11", True),
        ("2026-12", False),
        (name, True),
    ]
    assert not found.sound
    assert run_usage_audit(engine).months == ("2026-11", "2026-12")


@pytest.mark.parametrize("backend", [SQLITE], indirect=True)
@pytest.mark.parametrize("tenant", ["X'ff'", "CAST(X'ff' AS TEXT)"])
def test_chain_without_tenant_does_not_hide_others(engine: Engine, tenant: str) -> None:
    """The check names the missing end of the chain to the rows' tenant, also in a restore."""
    with engine.begin() as connection:
        connection.execute(
            text(f"UPDATE ledger_chains SET tenant = {tenant} WHERE tenant = 'acme' AND month = '2026-11'")
        )
        assert "acme 2026-11" in (verify_all_chains(connection).fault or "")


@pytest.mark.parametrize("backend", [SQLITE], indirect=True)
def test_total_of_a_replica_that_cannot_be_read_is_found(engine: Engine) -> None:
    """The months are still sound."""
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE ledger_runtime_totals SET runtime_id = CAST(X'ff' AS TEXT) WHERE runtime_id = 'rt-1'")
        )
    found = verify(engine)
    assert not found.sound
    assert found.replicas
    assert not any(each.differences for each in found.months)


def test_rows_that_are_rechained_leave_another_digest(engine: Engine) -> None:
    """The owner of the database can build a valid chain of other rows. Only a digest noted elsewhere shows it."""
    before = verify(engine, month="2026-12").months[0]
    forged = memory_ledger_engine()
    enter(forged, [request_record(6, ended_at_us=END_US + HOUR_US, completion_tokens=1)])
    after = verify(forged, month="2026-12").months[0]
    assert after.differences == ()
    assert after.chain != before.chain
    forged.dispose()


def test_a_total_that_returns_to_zero_leaves_no_row() -> None:
    """A correction in the next month takes back a cancelled request. A later one with equal figures is booked there."""
    engine = memory_ledger_engine()

    def cancelled(number: int) -> UsageRecord:
        return request_record(
            number, origin=RecordOrigin.ORPHAN, source="rt-1", outcome="cancelled", completion_tokens=64
        )

    enter(engine, [cancelled(1)])
    close(engine)
    enter(engine, [request_record(1)])
    enter(engine, [cancelled(2)])
    assert verify(engine).sound, verify(engine)
    with engine.connect() as connection:
        sums = connection.execute(text("SELECT outcome, requests FROM ledger_request_totals WHERE month > '2026-11'"))
        assert [tuple(row) for row in sums] == [("ok", 1)]
    engine.dispose()


def test_empty_totals_of_an_older_program_are_removed() -> None:
    """Older programs left rows of sums that had returned to zero."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    ensure_ledger(engine, STEPS[:8])
    enter(engine, [request_record(1)])
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO ledger_request_totals VALUES ('acme', '2026-11', 1, 'm', 'ok', 1, 0, 0, 0, 0)")
        )
        connection.execute(text("INSERT INTO ledger_step_totals VALUES ('acme', '2026-11', 1, 'cached', 0)"))
    assert not verify(engine).sound
    ensure_ledger(engine)
    assert verify(engine).sound
    engine.dispose()


EVERYTHING: Sequence[UsageRecord] = [
    *good_month(),
    LATE,
    request_record(4, origin=RecordOrigin.ORPHAN, source="rt-7", sequence=1, runtime_id="rt-7", completion_tokens=90),
    request_record(8, ended_at_us=END_US + HOUR_US),
    request_record(9, status=500, request_id="req-8"),
    lifetime_record(5, tenant=None, model=None, requests=0),
]


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=40)
def test_any_history_is_sound(data: st.DataObject) -> None:
    """Chains, totals and bills hold for records in any order, with repeats and months closed in between."""
    order = data.draw(st.permutations([*EVERYTHING, *data.draw(st.lists(st.sampled_from(EVERYTHING), max_size=6))]))
    engine = memory_ledger_engine()
    for record in order:
        enter(engine, [record])
        if data.draw(st.integers(min_value=0, max_value=5)) == 0:
            close(engine)
    for tenant in ("acme", ""):
        assert verify(engine, tenant=tenant).sound, verify(engine, tenant=tenant)
    with engine.connect() as connection:
        charged = connection.execute(
            text("SELECT SUM(requests), SUM(completion_tokens) FROM ledger_request_totals WHERE billable")
        ).one()
    # In any order, the totals of all months equal those of a ledger in which no month was closed.
    plain = memory_ledger_engine()
    enter(plain, order)
    with plain.connect() as connection:
        wanted = connection.execute(
            text("SELECT SUM(requests), SUM(completion_tokens) FROM ledger_request_totals WHERE billable")
        ).one()
    assert tuple(charged) == tuple(wanted)
    engine.dispose()
    plain.dispose()
