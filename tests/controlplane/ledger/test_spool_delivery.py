"""From a spool whose writer was killed to a balanced bill, with lost answers: no record is lost or billed twice."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from controlplane.billing.price_book import default_price_book
from controlplane.ledger.usage_ledger import Ledger
from kelvin.contracts.accounting.billing_reports import BillingReport
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import RequestBatch
from kelvin.contracts.wire import decode
from kelvin.spool import recover
from kelvin.spool.segment_reader import last_sequence
from tests.controlplane.billing_fixture import report
from tests.controlplane.builders import World

ROOT = Path(__file__).parents[3]

WRITER = """
import asyncio, os, sys
from pathlib import Path
from kelvin.contracts.wire import encode
from kelvin.spool import Spool
from tests.controlplane.usage_records import request_record

async def main():
    spool = Spool.open(Path(sys.argv[1]), "activator-1", segment_bytes=65536)
    async def one():
        while True:
            await spool.append(lambda sequence: encode(request_record(sequence, runtime_id=None)))
            os.write(1, b".")
    await asyncio.gather(*(one() for _ in range(8)))

asyncio.run(main())
"""


def kill_writer(spools: Path, records: int) -> int:
    """Kill the writer after that many records. Return how many it knew to be durable."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(spools)], cwd=ROOT, stdout=subprocess.PIPE, bufsize=0)
    assert writer.stdout is not None
    durable = 0
    while durable < records:
        durable += len(os.read(writer.stdout.fileno(), 4096))
    os.kill(writer.pid, signal.SIGKILL)
    durable += len(writer.stdout.read())
    writer.stdout.close()
    writer.wait(30)
    return durable


class LossySender:
    """A sender that loses every second answer after delivery, and every third batch before it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._calls = 0

    async def __call__(self, records: Sequence[bytes]) -> None:
        self._calls += 1
        if self._calls % 3 == 0:
            raise Refused(Unavailable("control plane"))
        await self._ledger.append_requests(RequestBatch(records=tuple(decode(raw, RequestRecord) for raw in records)))
        if self._calls % 2 == 1:
            raise Refused(Unavailable("control plane"))


async def billed(root: Path) -> BillingReport:
    """Return the bill after everything recoverable was recovered."""
    with closing(World(root)) as world:
        post = LossySender(world.ledger)
        for _ in range(100):
            if not await recover(root / "spool", lambda _: post):
                break
        assert {path.suffix for path in (root / "spool").rglob("*") if path.is_file()} <= {".damaged"}
        return report(world.database.engine, book=default_price_book(), live=set())


@pytest.mark.parametrize("records", [5, 900])
async def test_records_of_a_killed_writer_are_billed_once(tmp_path: Path, records: int) -> None:
    """Each durable record is in the bill exactly once, and the bill balances."""
    durable = kill_writer(tmp_path / "spool", records)
    found = await billed(tmp_path)
    assert found.balance.balanced, found.balance.problems
    assert found.balance.sources == 1
    assert durable <= found.requests["ok"] <= durable + 8
    assert found.completion_tokens == 7 * found.requests["ok"]


async def test_damaged_spool_record_is_named(tmp_path: Path) -> None:
    """Negative control: after one byte of a durable record was flipped, the bill names its source."""
    kill_writer(tmp_path / "spool", 900)
    source = tmp_path / "spool" / "activator-1"
    written, first = last_sequence(source), min(source.glob("*.seg"))
    content = bytearray(first.read_bytes())
    content[20_000] ^= 0x40
    first.write_bytes(content)
    found = await billed(tmp_path)
    assert found.requests["ok"] == written - 1
    (problem,) = found.balance.problems
    assert (problem.kind, problem.subject) == ("sequence_hole", "activator-1")
    assert not found.balance.balanced
    assert first.with_name(f"{first.name}.damaged").read_bytes() == content
