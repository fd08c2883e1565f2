"""The spending that activators receive is the current bill, with the records that it includes."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, func, select, text, update

import controlplane.billing.spending_feed
from controlplane.billing.billing_report import spent_micros
from controlplane.billing.price_book import default_price_book
from controlplane.billing.spending_feed import RECENT_SOURCES, SpendingFeed, spending
from controlplane.clock import SystemClock
from controlplane.db import schema
from controlplane.db.ledger_schema import request_records
from controlplane.ledger.policy.month import day_us
from controlplane.ledger.policy.rating import Bill, PriceBook, Prices
from controlplane.registry.feed_hub import FeedHub
from kelvin.contracts.accounting.spending import SpendingRow, TokenPrices
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import Feed, RequestBatch
from kelvin.contracts.wire import decode, encode
from tests.controlplane.billing_fixture import enter, memory_ledger_engine
from tests.controlplane.builders import BY, NOW_S, World
from tests.controlplane.control_plane_server import (
    OPERATOR,
    ControlPlaneClient,
    FeedReader,
    call_admin,
    open_feed,
    running_control_plane,
)
from tests.controlplane.usage_records import END_US, request_record
from tests.eventually import eventually

PROMPT = 500_000  # price of a million prompt tokens in the default price book

pytestmark = pytest.mark.usefixtures("backend")


async def spending_row(reader: FeedReader, spent: int) -> SpendingRow:
    """Return the first feed row with that spending."""
    async with asyncio.timeout(30):
        while True:
            for row in (await reader.line()).spending:
                if row.spent_micros == spent:
                    return row


async def post(client: ControlPlaneClient, *numbers: int, source: str = "activator-1") -> None:
    """Post records of requests that end now, with a million prompt tokens each."""
    records = tuple(
        request_record(
            number, tenant="default", source=source, request_id=f"{source}-{number}",
            ended_at_us=time.time_ns() // 1000, prompt_tokens=1_000_000, cached_tokens=0, completion_tokens=0,
        )
        for number in numbers
    )  # fmt: skip
    assert (await client.request("POST", "/internal/v1/usage/requests", encode(RequestBatch(records=records))))[
        0
    ] == 204


async def test_spending_of_budgets_is_published(data: Path) -> None:
    """A row is published when a budget is set, after each batch, and in the next control plane's snapshot. It has the
    bill's total and the last record of each spool. Control: without a budget there is no row.
    """
    async with running_control_plane(data) as client, open_feed(client) as reader:
        assert (await reader.line()).spending == ()
        await post(client, 1)
        await call_admin(client, OPERATOR, "PUT", "/tenants/default/limits", {"rpm": 5})
        line = await reader.line()
        assert (line.tenants[0].limits.rpm, line.spending) == (5, ())
        await call_admin(client, OPERATOR, "PUT", "/tenants/default/limits", {"budget_micros": 1_000_000})
        row = await spending_row(reader, PROMPT)
        assert (row.tenant, row.seen) == ("default", {"activator-1": 1})
        assert row.ends_at_us > time.time_ns() // 1000
        assert row.prices.cost_micros(1_000_000, 0, 0) == PROMPT
        await post(client, 2, 3)
        await post(client, 3, 2)  # repeats
        await post(client, 1, source="rt-1")  # an orphan record: not in `seen`, but on the bill
        row = await spending_row(reader, 4 * PROMPT)
        assert row.seen == {"activator-1": 3}
        report = (await client.admin("GET", f"/billing/report?month={row.month}"))[1]
        assert report["total_micros"] == row.spent_micros
        for bad in (-1, "much"):
            await call_admin(client, OPERATOR, "PUT", "/tenants/default/limits", {"budget_micros": bad}, status=400)
    async with running_control_plane(data) as client, open_feed(client) as reader:
        (again,) = (await reader.line()).spending
        assert again == row


async def test_budgets_are_published_after_an_error_of_the_database(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next publication comes soon. Until then requests could pass a spent budget."""
    monkeypatch.setattr(controlplane.billing.spending_feed, "FULL_READ_INTERVAL_S", 3600.0)
    errors, read = [ValueError("a row that no code of ours wrote"), OSError("disk I/O error")], spending

    def fails(connection: Connection, book: PriceBook, now_us: int, tenants: Sequence[str]) -> Any:
        if errors and connection.execute(select(func.count()).select_from(request_records)).scalar_one():
            raise errors.pop()
        return read(connection, book, now_us, tenants)

    async with running_control_plane(data) as client, open_feed(client) as reader:
        await call_admin(client, OPERATOR, "PUT", "/tenants/default/limits", {"budget_micros": 1})
        await spending_row(reader, 0)
        monkeypatch.setattr(controlplane.billing.spending_feed, "spending", fails)
        await post(client, 1)
        await spending_row(reader, PROMPT)
        assert errors == []


class FeedRecorder(FeedHub):
    """A feed that records the tenants of each spending line."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[set[str]] = []
        self.last: SpendingRow | None = None

    def publish(self, change: Feed) -> int:
        if change.spending:
            self.published.append({row.tenant for row in change.spending})
            self.last = change.spending[-1]
        return super().publish(change)


async def give_budgets(world: World, *tenants: str) -> None:
    """Create tenants that have a budget."""
    for tenant in tenants:
        await world.tenants.create(BY, tenant, NOW_S)
        await world.tenants.set_limits(BY, tenant, {"budget_micros": 1_000_000}, NOW_S)


async def test_unavailable_database_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once per outage: the database may be away for hours, and is read four times a second."""
    monkeypatch.setattr(controlplane.billing.spending_feed, "PUBLISH_INTERVAL_S", 0.001)
    rows, refusals = FeedRecorder(), 0
    with closing(World(tmp_path, feed=rows)) as world:
        spending, read = SpendingFeed(world.database, default_price_book(), rows, SystemClock()), world.database.read

        async def away(work: Any) -> Any:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise Refused(Unavailable("the database"))
            return await read(work)

        async def give(tenant: str) -> None:
            nonlocal refusals
            await give_budgets(world, tenant)
            refusals = 20
            spending.on_budget_changed(tenant)
            await eventually(lambda: {tenant} in rows.published, "the row is published")

        monkeypatch.setattr(world.database, "read", away)
        running = asyncio.create_task(spending.run())
        await give("acme")
        await give("b")
        running.cancel()
    assert [record.getMessage() for record in caplog.records] == ["budgets can't be published"] * 2


@pytest.mark.parametrize("tokens", [10, 0], ids=["charged", "free"])
async def test_a_record_sends_the_row_of_its_tenant_alone(tmp_path: Path, tokens: int) -> None:
    """The other tenants' rows are not sent, though the record's sequence is in all rows."""
    rows, now_us = FeedRecorder(), time.time_ns() // 1000
    with closing(World(tmp_path, feed=rows)) as world:
        await give_budgets(world, "acme", "b", "c")
        spending = SpendingFeed(world.database, default_price_book(), rows, SystemClock())
        await spending.publish_spending()
        running = asyncio.create_task(spending.run())
        record = request_record(1, ended_at_us=now_us, prompt_tokens=tokens, cached_tokens=0, completion_tokens=tokens)
        await world.ledger.append_requests(RequestBatch(records=(record,)))
        spending.on_requests_recorded([record])
        await eventually(lambda: len(rows.published) == 2, "the row is published")
        running.cancel()
        assert rows.last is not None
        assert rows.last.seen == {"activator-1": 1}
        await give_budgets(world, "d")
        await spending.publish_spending()
    assert rows.published == [{"acme", "b", "c"}, {"acme"}, {"d"}]


@pytest.mark.parametrize(
    ("limits", "published_tenants"),
    [
        pytest.param('{"budget_micros":5}', [{"acme"}], id="as the program writes it"),
        pytest.param('{"rpm" : 9, "budget_micros" : 5}', [{"acme"}], id="with spaces"),
        pytest.param('{"budget_micros":null}', [], id="an explicit null"),
        pytest.param('{"plan":"budget-micros"}', [], id="no budget"),
    ],
)
async def test_tenants_with_a_budget_are_those_that_activators_know(
    tmp_path: Path, limits: str, published_tenants: list[set[str]]
) -> None:
    """The form of the stored limits does not matter."""
    rows = FeedRecorder()
    with closing(World(tmp_path, feed=rows)) as world:
        await world.tenants.create(BY, "acme", NOW_S)
        write = update(schema.tenants).values(limits=limits)
        await world.database.write(lambda connection: connection.execute(write))
        await world.tenants.load(NOW_S)
        await SpendingFeed(world.database, default_price_book(), rows, SystemClock()).publish_spending()
    assert rows.published == published_tenants


def rows_of(engine: Engine, now_us: int, *tenants: str) -> tuple[list[SpendingRow], dict[str, Exception]]:
    with engine.connect() as connection:
        return spending(connection, default_price_book(), now_us, tenants)


def test_one_tenants_defect_stops_no_other_budget(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its account is left out and named. Activators keep its last row."""

    def reckon(connection: Connection, book: PriceBook, tenant: str, month: str) -> int:
        if tenant == "bad":
            raise ArithmeticError("defect")
        return spent_micros(connection, book, tenant, month)

    monkeypatch.setattr(controlplane.billing.spending_feed, "spent_micros", reckon)
    rows, failed = rows_of(engine, day_us(date(2026, 12, 2)), "acme", "bad", "zeta")
    assert [row.tenant for row in rows] == ["acme", "zeta"]
    assert list(failed) == ["bad"]


@pytest.mark.parametrize("value", ["'x'", "CAST(X'ff' AS TEXT)", "1.5"])
def test_last_sequence_of_a_source_is_a_number(value: str) -> None:
    """SQLite may store any value there. Activators cannot decode a feed line with another type."""
    engine = memory_ledger_engine()
    enter(engine, [request_record(1)])
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE ledger_received SET last = {value}"))
    rows, failed = rows_of(engine, END_US, "acme")
    assert not failed
    assert decode(encode(rows[0]), SpendingRow) == rows[0]
    engine.dispose()


@pytest.mark.parametrize("value", ["CAST(X'ff' AS TEXT)", "1.5"])
def test_rows_that_cannot_be_read_stop_no_other_budget(value: str) -> None:
    """SQLite may store any value in a column."""
    engine = memory_ledger_engine()
    enter(engine, [request_record(1, tenant="bad"), request_record(2)])
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE ledger_request_totals SET prompt_tokens = {value} WHERE tenant = 'bad'"))
    rows, failed = rows_of(engine, day_us(date(2026, 11, 20)), "acme", "bad")
    assert [row.tenant for row in rows] == ["acme"]
    assert list(failed) == ["bad"]
    engine.dispose()


@pytest.mark.parametrize(
    ("day", "beside"),
    [
        pytest.param(day_us(date(2026, 12, 1)), {"2026-11"}, id="the first day"),
        pytest.param(day_us(date(2026, 12, 2)), set(), id="the second day"),
        pytest.param(day_us(date(2026, 12, 30)), set(), id="the day before the last"),
        pytest.param(day_us(date(2026, 12, 31)), {"2027-01"}, id="the last day"),
    ],
)
def test_adjacent_month_is_published_near_month_ends(engine: Engine, day: int, beside: set[str]) -> None:
    """The clocks of activators may be behind or ahead."""
    (row,), _ = rows_of(engine, day, "acme")
    assert (row.month, set(row.beside)) == ("2026-12", beside)


def test_records_that_waited_for_longer_than_an_hour_are_seen(engine: Engine) -> None:
    """Otherwise their activator would count them twice. Of very many old activators, the latest are named."""
    now_us = day_us(date(2026, 12, 2))
    hours_ago = [
        request_record(
            1, source=f"activator-{hours}", request_id=f"r{hours}", ended_at_us=now_us - hours * 3_600_000_000
        )
        for hours in range(2, 4 + RECENT_SOURCES)
    ]
    enter(engine, hours_ago)
    (row,), _ = rows_of(engine, now_us, "acme")
    assert row.seen == {f"activator-{hours}": 1 for hours in range(2, 2 + RECENT_SOURCES)}


TOKENS = st.integers(0, 10_000_000)


@given(st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=20), st.sampled_from([1_000, 1_000_000]))
def test_activator_estimate_matches_the_ledger(requests: list[tuple[int, int, int]], per: int) -> None:
    """The estimate is never less than the bill by more than rounding, and at most a micro-unit per request more."""
    prices = Prices(from_us=0, per_tokens=per, prompt=7, cached=3, completion=11, request=2, device={})
    reckoned, bill = 0, Bill()
    edge = TokenPrices(per_tokens=per, prompt=7, cached=3, completion=11, request=2)
    for fresh, cached, completion in requests:
        reckoned += edge.cost_micros(fresh + cached, cached, completion)
        bill.add_requests(
            prices, "m", requests=1, prompt_tokens=fresh + cached, cached_tokens=cached, completion_tokens=completion
        )
    billed = sum(line.amount_micros for line in bill.lines())
    assert -2 <= reckoned - billed <= len(requests) + 2
