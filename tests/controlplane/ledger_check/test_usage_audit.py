"""The usage audit names each difference between two accounts once, with its size, and none where they agree."""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Column, Engine, StaticPool, create_engine, text

from controlplane.db.ledger_schema import metadata
from controlplane.ledger.policy.discrepancies import SpoolPosition
from controlplane.ledger_check.usage_audit import MAX_DIFFERENCES, MAX_IDS
from kelvin.contracts.accounting.billing_reports import BillingReport, Difference, ReconcileReport, VerifyReport
from kelvin.contracts.accounting.usage import ACK_TOKENS, RecordOrigin
from kelvin.contracts.errors import Conflict, Refused
from kelvin.contracts.wire import decode, encode
from tests.controlplane.billing_fixture import (
    ORPHANED,
    POSITIONS,
    UsageRecord,
    close,
    enter,
    good_month,
    ledger_and_registry_engine,
    report,
    run_usage_audit,
    verify,
)
from tests.controlplane.usage_records import END_US, HOUR_US, MONTH, lifetime_record, request_record


def test_a_good_month_agrees(engine: Engine) -> None:
    """Nothing is named, and the report says what was compared."""
    enter(engine, good_month())
    for month in (None, MONTH):
        report = run_usage_audit(engine, month)
        assert (report.agrees, report.differences, report.more) == (True, (), 0)
        compared = report.compared
        assert (compared.replicas, compared.served, compared.recorded, compared.orphans) == (2, 4, 4, 0)
        assert (compared.lived_us, compared.attributed_us) == (20_000_000, 20_000_000)
        assert (compared.active_us, compared.used_us) == (4_000_000, 1_902_000)
        assert (compared.sources, compared.rows) == (3, 8)


@dataclass(frozen=True)
class PlantedDifference:
    """A change of records or rows, and the difference that the audit must report."""

    records: Callable[[list[UsageRecord]], list[UsageRecord]] = lambda good: good
    statement: str = "SELECT 1"
    kind: str = ""
    subject: str = ""
    size: tuple[int | None, int | None, int | None, int | None] = (0, 0, 0, 0)
    ids: tuple[str, ...] = ()
    month: str | None = None


PLANTED_DIFFERENCES = [
    pytest.param(
        PlantedDifference(
            lambda good: [*good, request_record(7, runtime_id=None)], kind="sequence_hole", subject="activator-1",
            size=(1, None, None, None),
        ),
        id="a record that never arrived",
    ),
    pytest.param(
        PlantedDifference(
            lambda good: [*good[:-2], lifetime_record(1, runtime_id="rt-1", requests=4), good[-1]],
            kind="requests_missing", subject="rt-1", size=(2, 2 * POSITIONS, 100_000, 2 * 3_000 + 2 * 5),
            ids=("req-1", "req-2"),
        ),
        id="requests without records",
    ),
    pytest.param(
        PlantedDifference(
            lambda good: [*good, request_record(6, runtime_id="rt-1")], kind="requests_extra", subject="rt-1",
            size=(1, None, 1_901_000, None), ids=("req-1", "req-2", "req-6"),
        ),
        id="one answered request too many",
    ),
    pytest.param(
        PlantedDifference(
            lambda good: [*good, lifetime_record(3, requests=0, total_us=20_000_000)], kind="time_unaccounted",
            subject="rt-3", size=(0, 0, 10_000_000, 400),
        ),
        id="half a lifetime unaccounted for",
    ),
    pytest.param(
        PlantedDifference(
            lambda good: [*good, request_record(6, runtime_id="rt-3", device_us=3_000_000), lifetime_record(3)],
            kind="device_time_over", subject="rt-3", size=(0, 0, 1_000_000, 0), ids=("req-6",),
        ),
        id="more device time than there was",
    ),
    pytest.param(
        PlantedDifference(
            lambda good: [*good, request_record(6, runtime_id="rt-9")], kind="lifetime_missing", subject="rt-9",
            size=(1, 0, None, None), ids=("req-6",),
        ),
        id="a replica without a lifetime record",
    ),
    pytest.param(
        PlantedDifference(
            lambda good: [*good, request_record(6, request_id="req-1", prompt_tokens=1000, cached_tokens=0)],
            kind="conflict", subject="req-1 (activator-1#6)", size=(1, 1007, 1000, 1000 + 21 + 5), ids=("req-1",),
        ),
        id="a second record of one request",
    ),
    pytest.param(
        PlantedDifference(
            lambda good: [*good, lifetime_record(3, runtime_id="rt-2", requests=9)], kind="conflict",
            subject="rt-2 (supervisor-1#3)", size=(0, 0, 10_000_000, 5 + 80 + 72),
        ),
        id="a second record of one life",
    ),
    pytest.param(
        PlantedDifference(
            statement="UPDATE ledger_request_totals SET completion_tokens = completion_tokens + 5, "
            "requests = requests - 1 WHERE outcome = 'ok'", kind="total_wrong",
            subject="2026-11: 2026-11-01, m, ok, charged", size=(1, 5, 0, 5 + 15),
        ),
        id="a total of requests",
    ),
    pytest.param(
        PlantedDifference(
            statement="UPDATE ledger_request_totals SET prompt_tokens = 0 WHERE outcome = 'overloaded'; "
            "DELETE FROM ledger_request_totals WHERE outcome = 'overloaded'", kind="total_wrong",
            subject="2026-11: 2026-11-01, m, overloaded, free", size=(1, 0, 0, 0),
        ),
        id="a missing total of free requests",
    ),
    pytest.param(
        PlantedDifference(
            statement="UPDATE ledger_device_totals SET idle_us = idle_us - 2000000 WHERE device_class = 'cpu-2'",
            kind="total_wrong", subject="2026-11: 2026-11-01, m, cpu-2", size=(0, 0, 2_000_000, 20),
        ),
        id="a total of device time",
    ),
    pytest.param(
        PlantedDifference(
            statement="UPDATE ledger_runtime_totals SET answered = 1, first_at_us = 1 WHERE runtime_id = 'rt-2'",
            kind="total_wrong", subject="replica rt-2",
        ),
        id="a total of a replica",
    ),
    pytest.param(
        PlantedDifference(
            statement="INSERT INTO ledger_device_totals VALUES ('acme', '2026-11', 1, 'm', 'cpu-9', 1, 0, 0, 0)",
            kind="total_wrong", subject="2026-11: 1970-01-02, m, cpu-9", month=MONTH,
        ),
        id="a total without rows",
    ),
]  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED_DIFFERENCES)
def test_a_planted_difference_is_named_with_its_size(engine: Engine, planted: PlantedDifference) -> None:
    """It is the only difference, and the audit fails."""
    enter(engine, planted.records(good_month()))
    with engine.begin() as connection:
        for statement in planted.statement.split(";"):
            connection.execute(text(statement))
    report = run_usage_audit(engine, planted.month)
    assert not report.agrees
    (difference,) = report.differences
    assert (difference.kind, difference.subject, difference.fails) == (planted.kind, planted.subject, True)
    assert _size(difference) == planted.size
    assert difference.ids == planted.ids


def _size(difference: Difference) -> tuple[int | None, int | None, int | None, int | None]:
    return difference.requests, difference.tokens, difference.device_us, difference.amount_micros


def test_request_charged_by_its_last_acknowledgement_is_named(engine: Engine) -> None:
    """It may be short by the tokens since then. The audit does not fail, and the activator's record ends it."""
    enter(engine, [request_record(1), ORPHANED, lifetime_record(1, requests=2)])
    report = run_usage_audit(engine)
    (difference,) = report.differences
    assert (difference.kind, difference.subject, difference.fails) == ("charged_by_receipt", "req-2", False)
    assert _size(difference) == (0, ACK_TOKENS, 0, ACK_TOKENS * 3)
    assert (report.agrees, report.compared.orphans) == (True, 1)
    enter(engine, [request_record(2)])
    assert run_usage_audit(engine).differences == ()


@pytest.mark.parametrize("kept", [True, False])
def test_request_counted_by_two_replicas_is_charged_once(engine: Engine, kept: bool) -> None:
    """The first replica found damaged weights and recorded its count when it ended, and the second one answered.
    Negative control: without that record, the first replica's count is reported.
    """
    first = request_record(
        1, origin=RecordOrigin.ORPHAN, source="rt-7", sequence=1, runtime_id="rt-7", completion_tokens=0
    )
    enter(
        engine,
        [
            request_record(1),
            lifetime_record(1, requests=1),
            lifetime_record(7, sequence=2, runtime_id="rt-7", requests=1),
        ],
    )
    if kept:
        enter(engine, [first])
    report = run_usage_audit(engine)
    assert [(each.kind, each.subject) for each in report.differences] == (
        [] if kept else [("requests_missing", "rt-7")]
    )
    assert report.compared.orphans == 0, "the activator's record is charged"


def test_replica_and_activator_that_died_together_are_named(engine: Engine) -> None:
    """One request is in no record. The difference has its largest cost and how the replica ended."""
    enter(engine, [request_record(1), _killed(lifetime_record(1, requests=2))])
    (difference,) = run_usage_audit(engine).differences
    assert (difference.kind, difference.cause) == ("requests_missing", "the replica was killed by SIGKILL")
    assert _size(difference) == (1, POSITIONS, 1_999_000, 3_005)


def test_impact_is_unknown_for_unregistered_version(engine: Engine) -> None:
    """The unknown amounts are None, not zero."""
    enter(engine, [lifetime_record(1, model="gone")])
    (difference,) = run_usage_audit(engine).differences
    assert _size(difference) == (1, None, 2_000_000, None)


def _killed(life: Any) -> Any:
    return type(life)(**{name: getattr(life, name) for name in life.__struct_fields__} | {"exit_status": -9})


def test_unshipped_records_are_reported(engine: Engine) -> None:
    """They do not fail the audit. The cause of a gap says whether the source's spool exists."""
    enter(engine, [*good_month(), request_record(7, runtime_id=None)])
    report = run_usage_audit(engine, spools={"activator-1": SpoolPosition(7, 9), "activator-2": SpoolPosition(5, 5)})
    assert [(each.kind, each.subject, each.requests, each.fails) for each in report.differences] == [
        ("sequence_hole", "activator-1", 1, True),
        ("unshipped", "activator-1", 2, False),
    ]
    assert report.differences[0].cause == "its spool exists, but can't be read there"
    assert run_usage_audit(engine).differences[0].cause == "they were lost with its spool"


def test_closed_months_and_adjustments_agree(engine: Engine) -> None:
    """A correction that takes back a closed month's charge is in the totals of both months."""
    enter(engine, [request_record(1), ORPHANED, lifetime_record(1, requests=2)])
    close(engine)
    enter(engine, [request_record(2, sequence=2, completion_tokens=100), request_record(3, ended_at_us=END_US + 5)])
    enter(engine, [lifetime_record(2, died_at_us=END_US + HOUR_US, runtime_id="rt-9", requests=0)])
    report = run_usage_audit(engine)
    assert [each.kind for each in report.differences if each.fails] == ["requests_extra"]
    # rt-1 counted two requests, and a third one names it in December. Nothing else differs.
    assert report.months == (MONTH, "2026-12")


def test_a_source_and_a_replica_of_two_months_are_named_once(engine: Engine) -> None:
    """This holds for records in two months."""
    enter(engine, [request_record(2, runtime_id="rt-9"), request_record(4, runtime_id="rt-9", ended_at_us=END_US + 5)])
    report = run_usage_audit(engine, now_us=END_US + HOUR_US)
    assert [(each.kind, each.subject) for each in report.differences] == [
        ("lifetime_missing", "rt-9"), ("sequence_hole", "activator-1"), ("sequence_hole", "activator-1"),
    ]  # fmt: skip
    assert report.differences[0].ids == ("req-2", "req-4")


def test_listed_differences_are_bounded(engine: Engine) -> None:
    """Further differences are counted. At most MAX_IDS requests of a replica are named."""
    count = MAX_DIFFERENCES + 7
    enter(engine, [request_record(number, source=f"s-{number}", sequence=2) for number in range(count)])
    enter(engine, [lifetime_record(1, requests=count + 1, active_us=count * 1000)])
    report = run_usage_audit(engine)
    assert (len(report.differences), report.more, report.agrees) == (MAX_DIFFERENCES, 8, False)
    (missing,) = [each for each in report.differences if each.kind == "requests_missing"]
    assert len(missing.ids) == MAX_IDS


def _changed(source: Engine, statement: str) -> Engine:
    """Return a copy of the database after `statement`."""
    copy = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    from_, into = source.raw_connection().driver_connection, copy.raw_connection().driver_connection
    assert isinstance(from_, sqlite3.Connection)
    assert isinstance(into, sqlite3.Connection)
    from_.backup(into)
    into.execute(statement)
    into.commit()
    return copy


COLUMNS = [
    pytest.param(column, id=f"{table.name}.{column.name}")
    for table in metadata.sorted_tables
    if table.name not in ("ledger_journal", "ledger_open_lives")
    for column in table.c
]


@pytest.mark.deep
@pytest.mark.parametrize("column", COLUMNS)
def test_no_changed_value_makes_a_reader_fail(column: Column[Any]) -> None:
    """Both reports can be decoded for any changed value. The bill can be decoded, too, or is refused as a Conflict."""
    engine = ledger_and_registry_engine()
    enter(engine, [*good_month()[:3], request_record(2, status=500, sequence=4), *good_month()[4:]])
    close(engine)
    enter(engine, [EVERYTHING[-2], lifetime_record(9, runtime_id="rt-9", requests=0), request_record(4)])
    for value, which in product(("'x'", "CAST(X'ff' AS TEXT)", "1.5", str(9 * 10**18)), ("min", "max")):
        row = f"rowid = (SELECT {which}(rowid) FROM {column.table.name})"
        changed = _changed(engine, f"UPDATE {column.table.name} SET {column.name} = {value} WHERE {row}")
        decode(encode(verify(changed)), VerifyReport)
        decode(encode(run_usage_audit(changed, now_us=END_US + HOUR_US)), ReconcileReport)
        for month in (MONTH, "2026-12"):
            problem = None
            try:
                decode(encode(report(changed, month=month)), BillingReport)
            except Refused as refused:
                problem = refused.failure
            assert problem is None or isinstance(problem, Conflict)
        changed.dispose()
    engine.dispose()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        pytest.param("UPDATE ledger_lifetimes SET total_us = 'x'", "total_us is 'x'", id="a text for a number"),
        pytest.param("UPDATE ledger_received SET last = 1.5", "last is 1.5", id="a fraction"),
        pytest.param("UPDATE ledger_conflicts SET reason = CAST(X'ff' AS TEXT)", "UTF-8", id="bytes that are not text"),
    ],
)
def test_row_that_cannot_be_read_is_named(statement: str, says: str) -> None:
    """`reconcile` lists it with an unknown size, and the bill lists it as a problem."""
    engine = ledger_and_registry_engine()
    enter(engine, [*good_month(), request_record(2, status=500, sequence=4)])
    changed = _changed(engine, statement)
    named = [each for each in run_usage_audit(changed).differences if each.kind == "row_wrong"]
    assert says in named[0].detail
    assert (named[0].fails, named[0].requests, named[0].amount_micros) == (True, None, None)
    problems = [each.detail for each in report(changed).balance.problems if each.kind == "row_wrong"]
    assert says in problems[0]
    changed.dispose()
    engine.dispose()


EVERYTHING: Sequence[UsageRecord] = [
    *good_month(),
    request_record(4, origin=RecordOrigin.ORPHAN, source="rt-7", sequence=1, runtime_id="rt-7", completion_tokens=90),
    request_record(8, sequence=6, ended_at_us=END_US + HOUR_US, runtime_id=None),
    lifetime_record(7, sequence=3, runtime_id="rt-7", requests=1),
]


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=40)
def test_any_history_agrees(data: st.DataObject) -> None:
    """Totals equal the rows, for records in any order with repeats, and the month closed in between."""
    engine = ledger_and_registry_engine()
    for record in data.draw(st.permutations(EVERYTHING)):
        enter(engine, [record])
        if data.draw(st.integers(min_value=0, max_value=4)) == 0:
            close(engine)
    assert run_usage_audit(engine).agrees, run_usage_audit(engine)
    engine.dispose()
