"""Texts and numbers that the ledger's columns cannot hold are set aside, and block no other record."""

import pytest
from sqlalchemy import String

from controlplane.billing.billing_report import close_month
from controlplane.billing.price_book import default_price_book
from controlplane.db.ledger_schema import conflicts, lifetime_records, request_records
from controlplane.ledger.policy.month import month_after
from controlplane.ledger.policy.record_precedence import LIFETIME_TEXT_LENGTHS, REQUEST_TEXT_LENGTHS
from controlplane.ledger.usage_batches import read_batch
from controlplane.ledger.usage_ledger import Ledger
from controlplane.ledger_check.ledger_verification import verify_ledger
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.serving.control_messages import RequestBatch, batch_of
from kelvin.contracts.wire import encode
from tests.controlplane.billing_fixture import charged_records, requests, rows
from tests.controlplane.usage_records import END_US, HOUR_US, MONTH, request_record


def test_text_limits_match_the_columns() -> None:
    """Every accepted text fits its column. PostgreSQL would refuse the whole batch otherwise."""
    for table, words in ((request_records, REQUEST_TEXT_LENGTHS), (lifetime_records, LIFETIME_TEXT_LENGTHS)):
        lengths = {column.name: column.type.length for column in table.c if isinstance(column.type, String)}
        rest = {"origin", "orphan_of", "month", "chain", "replaces", "timeline"}  # columns that the ledger fills itself
        assert words == {name: length for name, length in lengths.items() if name not in rest}


@pytest.mark.usefixtures("backend")
async def test_the_longest_names_fit(ledger: Ledger) -> None:
    """A granted model is OWNER/MODEL. A record with a longer name is set aside, and the others are stored."""
    longest = f"{'o' * 63}/{'m' * 63}"
    good = request_record(1, tenant="t" * 63, model=longest, request_id="r" * 128, once="1" * 64)
    bad = request_record(2, sequence=2, source="s" * 200, tenant="t" * 200, outcome="x" * 65)
    await ledger.append_requests(requests(bad, good))
    assert [row["model"] for row in await rows(ledger, request_records)] == [longest]
    (aside,) = await rows(ledger, conflicts)
    assert (aside["tenant"], aside["reason"]) == ("t" * 63, "source has 200 characters")


@pytest.mark.usefixtures("backend")
async def test_damaged_record_does_not_block_the_batch(ledger: Ledger) -> None:
    """A number that no database holds is set aside as text. The rest of the batch is stored."""
    damaged = request_record(2, sequence=10**30, ended_at_us=-5, device_us=10**40)
    await ledger.append_requests(requests(request_record(1), damaged, request_record(3)))
    assert sorted(await charged_records(ledger)) == ["req-1", "req-3"]
    (row,) = await rows(ledger, conflicts)
    assert "1" + "0" * 40 in row["record"]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("damage", ["x", "\0"])
async def test_damaged_name_touches_no_closed_month(ledger: Ledger, damage: str) -> None:
    """One name is longer than any tenant's and begins with a tenant's name. The other has a NUL character."""
    tenant = "t" * 63
    await ledger.append_requests(requests(request_record(1, tenant=tenant)))
    await ledger.write_closing(
        lambda connection: close_month(
            connection, default_price_book(), tenant, MONTH, live=None, now_us=END_US + 2 * HOUR_US
        )
    )
    raw = encode(request_record(2, tenant=tenant + damage))
    records, unreadable = read_batch(encode(batch_of([raw])), RequestRecord, END_US)
    await ledger.append_requests(RequestBatch(records=records), unreadable)
    (aside,) = await rows(ledger, conflicts)
    assert (aside["tenant"], aside["month"]) == (tenant, month_after(MONTH))
    found = await ledger.database.read(lambda connection: verify_ledger(connection, tenant, None))
    assert found.sound
