"""A month's bill is exact. It balances if and only if no record is lost, double or in conflict."""

import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.engine import Engine

from controlplane.billing.billing_report import CLOSING_DELAY_US, MAX_PROBLEMS, billing_report, close_month
from controlplane.ledger.closed_months import currencies
from controlplane.ledger.policy.discrepancies import RECORD_DELAY_US, DiscrepancyKind
from controlplane.ledger.policy.month import day_us
from controlplane.ledger.policy.rating import PriceBook
from kelvin.contracts.accounting.billing_reports import DeviceUse
from kelvin.contracts.accounting.usage import RecordOrigin
from kelvin.contracts.errors import Conflict, Refused
from tests.controlplane.billing_fixture import (
    BOOK,
    ORPHANED,
    UsageRecord,
    close,
    enter,
    good_month,
    memory_ledger_engine,
    prices,
    report,
)
from tests.controlplane.usage_records import BEGIN_US, END_US, HOUR_US, MONTH, lifetime_record, request_record


def test_a_good_month(engine: Engine) -> None:
    """The bill counts requests by outcome, tokens, device time and money, and it balances."""
    enter(engine, good_month())
    found = report(engine)
    assert found.requests == {"cancelled": 1, "ok": 2, "overloaded": 1, "replica_lost": 1}
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (1030, 12, 17)
    assert found.device == (
        DeviceUse(device_class="cpu-1", lifetimes=1, restore_us=250_000, active_us=2_000_000, idle_us=7_250_000),
        DeviceUse(device_class="cpu-2", lifetimes=1, restore_us=250_000, active_us=2_000_000, idle_us=7_250_000),
    )
    amounts = {(line.item, line.device_class): line.amount_micros for line in found.lines}
    # Charged: requests 1, 2 and 4. Prompt 1020, of them 8 cached; completion 7 + 7 + 3.
    assert amounts == {
        ("prompt_tokens", None): 1012,
        ("cached_tokens", None): 1,  # 0.8
        ("completion_tokens", None): 51,
        ("requests", None): 15,
        ("device_restore", "cpu-1"): 5,
        ("device_active", "cpu-1"): 80,
        ("device_idle", "cpu-1"): 72,  # 72.5, rounded to even
        ("device_restore", "cpu-2"): 5,
        ("device_active", "cpu-2"): 80,
        ("device_idle", "cpu-2"): 72,
    }
    assert found.total_micros == sum(amounts.values())
    assert (found.currency, found.open_runtimes) == ("EUR", ())
    assert (found.balance.balanced, found.balance.lifetimes, found.balance.sources) == (True, 2, 3)
    assert found.balance.problems == ()


def test_bill_excludes_other_tenants_and_months(engine: Engine) -> None:
    """A report covers one tenant and one month."""
    enter(engine, good_month())
    for other in (report(engine, tenant="other"), report(engine, month="2026-10"), report(engine, month="2026-12")):
        assert (other.requests, other.lines, other.total_micros, other.device) == ({}, (), 0, ())
        assert other.balance.balanced


@pytest.mark.parametrize(
    ("ended_at_us", "month"),
    [
        pytest.param(BEGIN_US, "2026-11", id="the first microsecond"),
        pytest.param(BEGIN_US - 1, "2026-10", id="the microsecond before"),
        pytest.param(END_US - 1, "2026-11", id="the last microsecond"),
        pytest.param(END_US, "2026-12", id="the microsecond after"),
    ],
)
def test_request_is_billed_in_the_month_of_its_end(engine: Engine, ended_at_us: int, month: str) -> None:
    """Months are in UTC, and each instant is in exactly one."""
    enter(engine, [request_record(1, ended_at_us=ended_at_us)])
    counted = {name: sum(report(engine, month=name).requests.values()) for name in ("2026-10", "2026-11", "2026-12")}
    assert counted == {name: int(name == month) for name in counted}


def test_prices_change_within_a_month(engine: Engine) -> None:
    """A request has the price at its end. Each price has its own line."""
    changed_us = day_us(date(2026, 11, 15))
    book = PriceBook("EUR", (prices(date(2026, 1, 1)), prices(date(2026, 11, 15), prompt=9_000)))
    enter(
        engine,
        [request_record(1, ended_at_us=changed_us - 1), request_record(2, ended_at_us=changed_us)],
    )
    lines = [line for line in report(engine, book=book).lines if line.item == "prompt_tokens"]
    assert [(line.since, line.quantity, line.amount_micros) for line in lines] == [
        ("2026-01-01", 6, 6),
        ("2026-11-15", 6, 54),
    ]


def test_a_replica_over_the_turn_of_the_month(engine: Engine) -> None:
    """A request counts in the month of its end, device time in the month of the death. Both months balance."""
    enter(
        engine,
        [
            request_record(1, ended_at_us=END_US - 5),
            request_record(2, ended_at_us=END_US + 5),
            lifetime_record(1, runtime_id="rt-1", died_at_us=END_US + HOUR_US, requests=2),
        ],
    )
    november, december = report(engine), report(engine, month="2026-12")
    assert (november.requests, november.device, november.open_runtimes) == ({"ok": 1}, (), ())
    assert december.requests == {"ok": 1}
    assert [use.lifetimes for use in december.device] == [1]
    assert december.balance.balanced
    assert november.balance.balanced


def test_unused_standby_is_billed_to_nobody(engine: Engine) -> None:
    """It is the platform's cost, and leaves no gap in its source."""
    enter(engine, [lifetime_record(1, tenant=None, model=None, requests=0), lifetime_record(2, requests=0)])
    found = report(engine)
    assert [use.lifetimes for use in found.device] == [1]
    assert found.balance.balanced


@pytest.mark.parametrize("lost", range(len(good_month())))
def test_dropping_any_one_record_is_found(engine: Engine, lost: int) -> None:
    """Negative control of the balance: the report names the source or the replica of any missing record."""
    records = good_month()
    gone = records.pop(lost)
    enter(engine, records)
    found = report(engine, live=set())
    if gone == good_month()[4] or gone == good_month()[5]:
        # It is the last record of its source, and no runtime counts it. Only the next record of the source
        # shows the gap.
        enter(engine, [request_record(50, source=gone.source, sequence=gone.sequence + 1, runtime_id=None)])
        found = report(engine, live=set())
    assert not found.balance.balanced
    named = {problem.subject for problem in found.balance.problems}
    assert named & {gone.source, gone.runtime_id}


@pytest.mark.parametrize(
    ("break_it", "kind", "subject"),
    [
        pytest.param(
            lambda good: [*good, request_record(7, runtime_id=None)], DiscrepancyKind.SEQUENCE_HOLE, "activator-1",
            id="a skipped sequence",
        ),
        pytest.param(
            lambda good: [*good, request_record(6, runtime_id="rt-1")], DiscrepancyKind.REQUESTS_EXTRA, "rt-1",
            id="one request too many",
        ),
        pytest.param(
            lambda good: [*good, request_record(6, request_id="req-1")], DiscrepancyKind.CONFLICT,
            "req-1 (activator-1#6)", id="a second record of one request",
        ),
        pytest.param(
            lambda good: [*good, lifetime_record(3, runtime_id="rt-2", requests=9)], DiscrepancyKind.CONFLICT,
            "rt-2 (supervisor-1#3)", id="a second record of one replica",
        ),
        pytest.param(
            lambda good: [*good, lifetime_record(3, requests=0, total_us=20_000_000)], DiscrepancyKind.TIME_UNACCOUNTED,
            "rt-3", id="half a life unaccounted for",
        ),
        pytest.param(
            lambda good: [*good, request_record(6, runtime_id="rt-3", device_us=3_000_000), lifetime_record(3)],
            DiscrepancyKind.DEVICE_TIME_OVER, "rt-3", id="more device time than there was",
        ),
        pytest.param(
            lambda good: [*good, request_record(6, runtime_id="rt-9")], DiscrepancyKind.LIFETIME_MISSING, "rt-9",
            id="a dead replica without a record",
        ),
    ],
)  # fmt: skip
def test_each_imbalance_is_named(
    engine: Engine, break_it: Callable[[list[UsageRecord]], list[UsageRecord]], kind: DiscrepancyKind, subject: str
) -> None:
    enter(engine, break_it(good_month()))
    found = report(engine, live=set())
    assert [(problem.kind, problem.subject) for problem in found.balance.problems] == [(kind, subject)]
    assert not found.balance.balanced


@pytest.mark.parametrize(
    ("live", "passed_us", "balanced"),
    [
        pytest.param({"rt-9"}, 10 * RECORD_DELAY_US, True, id="the replica lives"),
        pytest.param(set(), RECORD_DELAY_US, True, id="its record may be on its way"),
        pytest.param(set(), RECORD_DELAY_US + 1, False, id="the replica is gone without a record"),
        pytest.param(None, 10 * RECORD_DELAY_US, True, id="the live replicas are unknown"),
    ],
)
def test_replicas_without_a_lifetime_record(
    engine: Engine, live: set[str] | None, passed_us: int, balanced: bool
) -> None:
    """They are listed as open. A dead replica without a record is a problem."""
    record = request_record(1, runtime_id="rt-9")
    enter(engine, [record])
    found = report(engine, live=live, now_us=record.ended_at_us + passed_us)
    assert found.open_runtimes == ("rt-9",)
    assert found.balance.balanced is balanced


def test_a_request_that_two_runtimes_served(engine: Engine) -> None:
    """The request was retried after the first activator was lost. Both runtimes count it, and it is charged once."""
    enter(
        engine,
        [
            request_record(
                1,
                origin=RecordOrigin.ORPHAN,
                source="rt-1",
                runtime_id="rt-1",
                completion_tokens=0,
                outcome="cancelled",
            ),
            request_record(1, runtime_id="rt-2"),
            lifetime_record(1),
            lifetime_record(2),
        ],
    )
    found = report(engine)
    assert found.requests == {"ok": 1}
    assert found.balance.problems == ()


def test_problems_are_bounded(engine: Engine) -> None:
    """Further problems are counted."""
    enter(engine, [request_record(number, source=f"s-{number}", sequence=2) for number in range(MAX_PROBLEMS + 30)])
    found = report(engine)
    assert (len(found.balance.problems), found.balance.more) == (MAX_PROBLEMS, 30)


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=40)
def test_duplicates_and_order_do_not_change_the_bill(data: st.DataObject) -> None:
    """Any order, repeats and batches give the same report."""
    everything = good_month()
    shuffled = data.draw(st.permutations(everything + data.draw(st.lists(st.sampled_from(everything), max_size=8))))
    cut = data.draw(st.integers(min_value=0, max_value=len(shuffled)))
    mixed, plain = memory_ledger_engine(), memory_ledger_engine()
    enter(mixed, shuffled[:cut])
    enter(mixed, shuffled[cut:])
    enter(plain, everything)
    assert report(mixed, live=set()) == report(plain, live=set())
    mixed.dispose()
    plain.dispose()


def test_memory_does_not_grow_with_the_month(tmp_path: Path) -> None:
    """Ten times the records use the same memory: the database computes the sums, and rows are streamed."""
    peaks = []
    for count in (150, 1500):
        engine = memory_ledger_engine()
        for begin in range(1, count + 1, 1000):
            numbers = range(begin, min(begin + 1000, count + 1))
            enter(engine, [request_record(number, runtime_id=f"rt-{number}") for number in numbers])
            enter(engine, [lifetime_record(number) for number in numbers])
        report(engine)
        tracemalloc.start()
        found = report(engine)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.balance.balanced
        assert found.balance.lifetimes == count
        engine.dispose()
    assert peaks[1] < 2 * peaks[0] + 200_000


def _steps(engine: Engine) -> int:
    """Return the work of SQLite for one report, in tens of its instructions."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    report(engine)
    with engine.connect() as connection:
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.set_progress_handler(count, 10)
        billing_report(connection, BOOK, "acme", MONTH, live=None, now_us=END_US)
        raw.set_progress_handler(None, 10)
    return steps


def test_the_work_of_a_report_does_not_grow_with_the_requests() -> None:
    """Ten times the requests cause the same work. The report reads totals, not requests."""
    work = []
    for count in (300, 3000):
        engine = memory_ledger_engine()
        enter(engine, [request_record(number) for number in range(1, count + 1)])
        enter(engine, [lifetime_record(1, requests=count, active_us=count * 1_000)])
        assert report(engine).balance.balanced
        work.append(_steps(engine))
        engine.dispose()
    assert work[1] <= work[0] + 2


def test_late_record_adjusts_an_open_month(engine: Engine) -> None:
    """The closed bill stays, also under other prices. A better record of a billed request takes back the old charge."""
    enter(engine, [request_record(1), ORPHANED, lifetime_record(1, requests=2)])
    with engine.begin() as connection:
        first = close_month(connection, BOOK, "acme", MONTH, live=None, now_us=END_US + CLOSING_DELAY_US)
    enter(engine, [request_record(3, sequence=2), request_record(2, sequence=3, completion_tokens=100)])
    dear = PriceBook("EUR", (prices(date(2026, 1, 1), prompt=9_000),))
    assert report(engine, book=dear) == first.report
    assert first.report.closed_at_us == END_US + CLOSING_DELAY_US
    with engine.begin() as connection:
        assert close_month(connection, dear, "acme", MONTH, live=None, now_us=END_US + 2 * CLOSING_DELAY_US) == first
    december = report(engine, book=dear, month="2026-12")
    assert (december.requests, december.completion_tokens) == ({}, 0)
    lines = {line.item: (line.quantity, line.price_micros, line.adjusts) for line in december.lines}
    # One more request of 6 uncached, 4 cached and 7 completion tokens, and 100 tokens instead of 64.
    assert lines == {
        "prompt_tokens": (6, 1_000, MONTH),
        "cached_tokens": (4, 100, MONTH),
        "completion_tokens": (7 + 100 - 64, 3_000, MONTH),
        "requests": (1, 5, MONTH),
    }


@pytest.mark.parametrize("value", ["'x'", "CAST(X'ff' AS TEXT)"])
def test_prices_that_cannot_be_read_hide_no_other_currency(value: str) -> None:
    """A start compares the currencies of closed months. One tenant's unreadable row must not prevent it."""
    engine = memory_ledger_engine()
    enter(engine, good_month())
    close(engine)
    with engine.begin() as connection:
        assert currencies(connection) == {"EUR"}
        copied = "closed_at_us, prices, report, month, link, chain"
        whole = f"SELECT 'b', {copied} FROM ledger_closings"
        connection.execute(text(f"INSERT INTO ledger_closings (tenant, {copied}) {whole}"))
        connection.execute(text(f"UPDATE ledger_closings SET prices = {value} WHERE tenant = 'acme'"))
        assert currencies(connection) == {"EUR"}
    engine.dispose()


@pytest.mark.parametrize("early_us", [1, END_US - BEGIN_US])
def test_unfinished_month_is_not_closed(engine: Engine, early_us: int) -> None:
    """It cannot be closed in the hour after its end either, because its last records may still arrive."""
    with engine.begin() as connection, pytest.raises(Refused) as caught:
        close_month(connection, BOOK, "acme", MONTH, live=None, now_us=END_US + CLOSING_DELAY_US - early_us)
    assert caught.value.failure == Conflict("month", "2026-11 can be closed an hour after its end")
