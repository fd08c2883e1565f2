"""Words and figures are as large as the ledger has room for; larger ones hold up nothing."""

from pathlib import Path

import pytest
from sqlalchemy import String

from controlplane.ledger import Ledger
from controlplane.ledger_schema import conflicts, lifetime_records, request_records
from controlplane.policy.standing import LIFETIME_WORDS, REQUEST_WORDS
from tests.controlplane.test_ledger import charged, requests, rows, with_ledger
from tests.controlplane.usage_records import request_record


def test_words_are_as_long_as_their_columns() -> None:
    """What the policy lets in fits, in every database; PostgreSQL would refuse the whole batch."""
    for table, words in ((request_records, REQUEST_WORDS), (lifetime_records, LIFETIME_WORDS)):
        lengths = {column.name: column.type.length for column in table.c if isinstance(column.type, String)}
        rest = {"origin", "orphan_of", "month", "chain", "replaces", "timeline"}  # what is made here
        assert words == {name: length for name, length in lengths.items() if name not in rest}


@pytest.mark.usefixtures("backend")
def test_the_longest_names_fit(tmp_path: Path) -> None:
    """A granted model is OWNER/M; what is longer than any name is kept aside, and holds up nothing."""
    longest = f"{'o' * 63}/{'m' * 63}"

    async def scenario(ledger: Ledger) -> None:
        good = request_record(1, tenant="t" * 63, model=longest, request_id="r" * 128, once="1" * 64)
        bad = request_record(2, sequence=2, source="s" * 200, tenant="t" * 200, outcome="x" * 65)
        await ledger.append_requests(requests(bad, good))
        assert [row["model"] for row in await rows(ledger, request_records)] == [longest]
        (aside,) = await rows(ledger, conflicts)
        assert (aside["tenant"], aside["reason"]) == ("t" * 63, "source has 200 characters")

    with_ledger(tmp_path, scenario)


@pytest.mark.usefixtures("backend")
def test_damage_does_not_block_what_comes_after(tmp_path: Path) -> None:
    """Figures that no database holds are kept aside, as text; the rest of the batch enters."""

    async def scenario(ledger: Ledger) -> None:
        damaged = request_record(2, sequence=10**30, ended_at_us=-5, device_us=10**40)
        await ledger.append_requests(requests(request_record(1), damaged, request_record(3)))
        assert sorted(await charged(ledger)) == ["req-1", "req-3"]
        (row,) = await rows(ledger, conflicts)
        assert "1" + "0" * 40 in row["record"]

    with_ledger(tmp_path, scenario)
