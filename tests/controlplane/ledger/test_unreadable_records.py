"""A usage record that cannot be read is set aside, and blocks no other record."""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from controlplane.db.ledger_schema import conflicts
from controlplane.ledger.usage_batches import MAX_BATCH, read_batch
from controlplane.ledger.usage_ledger import Ledger
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import InvalidRequest, Refused, Unavailable
from kelvin.contracts.serving.control_messages import RequestBatch, batch_of
from kelvin.contracts.wire import encode
from kelvin.spool.frame import MAX_RECORD_BYTES
from kelvin.spool.segment_writer import SegmentWriter
from kelvin.spool.shipper import Shipper
from kelvin.spool.spool import Spool
from tests.controlplane.billing_fixture import charged_records, report, rows
from tests.controlplane.builders import installed, restore_backup
from tests.controlplane.control_plane_server import running_control_plane
from tests.controlplane.usage_records import END_US, lifetime_record, request_record

GOOD = encode(request_record(1)), encode(request_record(3))
HALF = encode({"request_id": "req-2", "tenant": "acme", "source": "activator-1", "sequence": 2, "surprise": 1})

BAD = [
    pytest.param(HALF, "surprise", id="half a record"),
    pytest.param(b'{"tenant":"acme"}', "missing required field", id="only a tenant"),
    pytest.param(b"[" * 5000 + b"]" * 5000, "Expected `object`", id="nested deeply"),
    pytest.param(b"\xff\x00 no JSON", "Expected `object`", id="not JSON"),
    pytest.param(encode(request_record(2, outcome="a\0b")), "NUL", id="a NUL character"),
    pytest.param(encode(request_record(2, source="cut-rt-7")), "must not begin with 'cut-'", id="a reserved source"),
]


async def post(ledger: Ledger, *records: bytes) -> None:
    """Post records as the route does with a sender's body."""
    entered, unreadable = read_batch(encode(batch_of(records)), RequestRecord, END_US - 1)
    await ledger.append_requests(RequestBatch(records=entered), unreadable)


@pytest.mark.parametrize(("bad", "reason"), BAD)
@pytest.mark.usefixtures("backend")
async def test_unreadable_record_is_kept_aside(ledger: Ledger, bad: bytes, reason: str) -> None:
    """The records around it are stored. It is set aside and counted once, with the reason."""
    for _ in range(2):
        await post(ledger, GOOD[0], bad, GOOD[1])
    assert sorted(await charged_records(ledger)) == ["req-1", "req-3"]
    (aside,) = await rows(ledger, conflicts)
    assert reason in aside["reason"]
    assert ledger.kept_aside == 1


async def test_unreadable_record_leaves_no_sequence_gap(ledger: Ledger) -> None:
    """The balance names the record that was set aside, and its source has no gap."""
    await post(ledger, GOOD[0], HALF, GOOD[1])
    problems = report(ledger.database.engine).balance.problems
    assert [(problem.kind, problem.subject) for problem in problems] == [("conflict", "req-2")]


@pytest.mark.parametrize("kind", ["requests", "lifetimes"])
async def test_shipping_goes_on_behind_an_unreadable_record(data: Path, tmp_path: Path, kind: str) -> None:
    """A spool's shipper delivers everything. No record waits behind the unreadable one."""
    path = f"/internal/v1/usage/{kind}"
    good = encode(request_record(2) if kind == "requests" else lifetime_record(2))
    async with running_control_plane(data) as client:

        async def post(records: Sequence[bytes]) -> None:
            status, _ = await client.request("POST", path, encode(batch_of(records)))
            if status != 204:
                raise Refused(Unavailable("the control plane"))

        spool = Spool.open(tmp_path / "spool", "source-1")
        try:
            for payload in (b'{"later":1}', b"\xff", good):
                await spool.append(lambda _, payload=payload: payload)  # type: ignore[misc]
            shipper = Shipper(spool, post, backoff_s=0.0)
            assert await shipper.flush(Deadline.after(5.0, time.monotonic()))
            assert shipper.backlog == 0
        finally:
            spool.close()


async def test_restore_keeps_unreadable_records_aside(tmp_path: Path) -> None:
    """The journal holds some of them, and a spool in the backup holds another. All are in the restored ledger once."""
    async with installed(tmp_path) as world:
        directory = world.data / "spool" / "activator-1"
        directory.mkdir(parents=True)
        journal = SegmentWriter(directory)
        journal.commit([lambda _: b'{"request_id":"waits","tenant":"acme"}'])
        journal.close()
        assert await world.backup_loop().make_backup() is not None
        await post(world.ledger, GOOD[0], HALF, b"x" * MAX_RECORD_BYTES)
    report = restore_backup(tmp_path / "place", tmp_path / "new")
    assert (report.unreadable, report.unshipped, report.replayed, report.missing) == (1, 0, 3, 0)
    with closing(sqlite3.connect(tmp_path / "new" / "kelvin.db")) as database:
        subjects = database.execute("SELECT subject FROM ledger_conflicts ORDER BY subject").fetchall()
    assert subjects == [("req-2",), ("unknown",), ("waits",)]


async def test_record_of_newer_program_waits_for_its_program(data: Path) -> None:
    """The record is refused, so its sender keeps it until the control plane is upgraded, too."""
    record = encode({**msgspec.to_builtins(request_record(2)), "surprise": 1})
    async with running_control_plane(data) as client:
        body = encode(batch_of([GOOD[0], record]))
        status, problem = await client.request("POST", "/internal/v1/usage/requests", body)
        assert (status, problem["code"]) == (400, "invalid_request")
        assert "the field 'surprise', of a newer program" in problem["detail"]


async def test_batch_of_too_many_unreadable_records_is_refused(ledger: Ledger) -> None:
    """The error has the number and the limit. A batch at the limit is set aside."""
    records = [b"%d" % number for number in range(MAX_BATCH + 1)]
    with pytest.raises(Refused) as caught:
        await post(ledger, *records)
    assert caught.value.failure == InvalidRequest("records", str(MAX_BATCH + 1), f"must be at most {MAX_BATCH}")
    await post(ledger, *records[:-1])
    assert ledger.kept_aside == MAX_BATCH
