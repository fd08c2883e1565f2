"""The ledger's content does not depend on the order, size or repetition of batches, nor on a SIGKILL of the writer."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.billing.price_book import default_price_book
from controlplane.db.ledger_schema import metadata
from controlplane.ledger.usage_ledger import Ledger
from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin, RequestRecord
from kelvin.contracts.serving.control_messages import LifetimeBatch
from tests.controlplane.billing_fixture import report, requests, rows, verify
from tests.controlplane.builders import World
from tests.controlplane.usage_records import lifetime_record, request_record

ROOT = Path(__file__).parents[3]
WRITER = """
import asyncio, os, sys
from pathlib import Path
from kelvin.contracts.serving.control_messages import RequestBatch
from controlplane.ledger.usage_ledger import Ledger
from controlplane.db.database import Database, sqlite_engine
from tests.controlplane.usage_records import request_record

async def main():
    ledger = Ledger(Database(sqlite_engine(Path(sys.argv[1]))))
    number = 1
    while True:
        batch = tuple(request_record(one) for one in range(number, number + 7))
        await ledger.append_requests(RequestBatch(records=batch))
        number += 7
        os.write(1, b"%d\\n" % (number - 1))

asyncio.run(main())
"""


@pytest.mark.parametrize("batches", [1, 9, 30])
def test_acknowledged_batches_survive_sigkill(tmp_path: Path, batches: int) -> None:
    """Only whole batches are in the ledger, and all acknowledged ones."""
    path = tmp_path / "kelvin.db"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, bufsize=0)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(batches)][-1]
    os.kill(writer.pid, signal.SIGKILL)
    writer.stdout.read()
    writer.stdout.close()
    writer.wait(30)
    with sqlite3.connect(path) as connection:
        (count,) = connection.execute("SELECT COUNT(*) FROM ledger_requests").fetchone()
        ranges = connection.execute("SELECT first, last FROM ledger_received").fetchall()
    connection.close()
    assert count >= acknowledged
    assert count % 7 == 0
    assert ranges == [(1, count)]


RECORDS = [
    *(request_record(number, runtime_id=f"rt-{number % 2}") for number in range(1, 7)),
    request_record(1, source="activator-2", request_id="other", outcome="cancelled", completion_tokens=0),
]
ORPHANS = [
    request_record(
        number, origin=RecordOrigin.ORPHAN, source=f"rt-{number % 2}", runtime_id=f"rt-{number % 2}", sequence=index
    )
    for index, number in ((1, 2), (2, 4), (1, 9))
]
LIVES = [lifetime_record(number, runtime_id=f"rt-{number}", requests=4) for number in range(3)]
Delivery = Sequence[RequestRecord | LifetimeRecord]
BOOK = default_price_book()


def contents(path: Path, batches: Sequence[Delivery]) -> list[Any]:
    """Return all tables and the report after these batches, without the rows' places in the chain."""

    async def main(ledger: Ledger) -> list[Any]:
        found: list[Any] = []
        for batch in batches:
            await ledger.append_requests(requests(*(each for each in batch if isinstance(each, RequestRecord))))
            lives = tuple(each for each in batch if isinstance(each, LifetimeRecord))
            await ledger.append_lifetimes(LifetimeBatch(records=lives))
        for table in metadata.sorted_tables:
            place = {"link", "chain"}
            kept = [{key: value for key, value in row.items() if key not in place} for row in await rows(ledger, table)]
            found.append(sorted(kept, key=repr))
        return found

    with closing(World(path)) as world:
        found = asyncio.run(main(world.ledger))
        assert verify(world.database.engine).sound
        return [*found, report(world.database.engine, book=BOOK, live=set())]


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=30)
def test_order_repeats_and_batches_do_not_matter(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Batches of several sources that are delayed, reordered, cut or repeated give the same rows and report."""
    everything: Delivery = [*RECORDS, *ORPHANS, *LIVES]
    repeats = data.draw(st.lists(st.sampled_from(everything), max_size=10))
    shuffled = data.draw(st.permutations([*everything, *repeats]))
    cuts = sorted(data.draw(st.sets(st.integers(min_value=0, max_value=len(shuffled)), max_size=4)))
    batches = [shuffled[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(shuffled)], strict=True)]
    if batches:
        batches.insert(data.draw(st.integers(0, len(batches))), data.draw(st.sampled_from(batches)))
    got = contents(tmp_path_factory.mktemp("shuffled"), batches)
    assert got == contents(tmp_path_factory.mktemp("plain"), [everything])


@pytest.mark.usefixtures("backend")
def test_missing_record_changes_the_report(tmp_path: Path) -> None:
    """Negative control: without one record, the tables and the report differ."""
    everything: Delivery = [*RECORDS, *ORPHANS, *LIVES]
    whole = contents(tmp_path / "whole", [everything])
    for missing in (0, len(RECORDS), len(everything) - 1):
        less = [record for index, record in enumerate(everything) if index != missing]
        assert contents(tmp_path / f"less-{missing}", [less]) != whole
