"""Requests that lost their activator are recorded once, durably, with the acknowledged tokens."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.accounting.usage import Receipt, RequestRecord
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import RequestBatch, batch_of
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.wire import decode, encode
from kelvin.spool import recover
from runtime.api import orphan_records as module
from runtime.api.orphan_records import OrphanRecords, UnconfirmedRequest, open_orphan_records
from tests.runtime.fakes import MemoryRecords

LIVE = "activator-lives"


def _lives(source: str) -> bool:
    return source == LIVE


def _account(request_id: str, delivered: int = 0, activator: str = "activator-dead") -> UnconfirmedRequest:
    return UnconfirmedRequest(
        request_id=request_id,
        activator=activator,
        tenant="acme",
        model="m",
        version="ab" * 32,
        key_id="k",
        runtime_id="rt1",
        started_at_us=10,
        ended_at_us=20,
        stream=True,
        counts=Counts(7, 0, 9, 500),
        delivered_tokens=delivered,
    )


async def test_orphan_record_is_written_after_the_grace() -> None:
    """The record is written after the grace, because a DELETE may be on its way. Later receipts still count."""
    records = MemoryRecords()
    orphans = OrphanRecords("rt1", records.append, _lives, grace_s=0.02)
    orphans.add(_account("a", 2), connection_lost=True)
    for name, tokens in (("a", 5), ("a", 4), ("b", 4)):
        orphans.apply_receipt(Receipt(request_id=name, completion_tokens=tokens))
    assert records.records == []
    async with asyncio.timeout(30):
        await records.written.wait()
    (record,) = records.records
    assert (record.completion_tokens, record.prompt_tokens, record.device_us) == (5, 7, 500)
    await orphans.flush()
    assert len(records.records) == 1


@pytest.mark.virtual_time
@pytest.mark.parametrize("connection_lost", [True, False])
@pytest.mark.parametrize("dies", [True, pytest.param(False, id="the control")])
async def test_dead_activators_record_is_written_soon(dies: bool, connection_lost: bool) -> None:
    """A dead activator's record is written soon, with receipts that arrive meanwhile.
    The activator's lock is held until its process has ended, which is after its connections."""
    looks = 0

    def lives(_: str) -> bool:
        nonlocal looks
        looks += 1
        return not dies or looks < 3

    loop = asyncio.get_running_loop()
    records = MemoryRecords()
    orphans = OrphanRecords("rt1", records.append, lives, grace_s=60)
    orphans.add(_account("a", 2), connection_lost=connection_lost)
    began_s = loop.time()
    await asyncio.sleep(3.5 * module.ORPHAN_POLL_S)  # the death was noticed once
    orphans.apply_receipt(Receipt(request_id="a", completion_tokens=5))
    with suppress(TimeoutError):
        async with asyncio.timeout(50):
            await records.written.wait()
    assert [record.completion_tokens for record in records.records] == ([5] if dies else [])
    assert (loop.time() - began_s <= 5 * module.ORPHAN_POLL_S) is dies


async def test_confirmed_record_is_not_written() -> None:
    """A record that is durable at its activator is not written here. The other one is."""
    records = MemoryRecords()
    orphans = OrphanRecords("rt1", records.append, _lives, grace_s=60)
    orphans.add(_account("a"), connection_lost=True)
    orphans.add(_account("b"), connection_lost=True)
    for name in ("a", "nobody"):
        orphans.apply_receipt(Receipt(request_id=name, completion_tokens=0, recorded=True))
    await orphans.flush()
    assert [record.request_id for record in records.records] == ["b"]


async def test_answered_elsewhere_is_written_at_once_undelivered() -> None:
    """A request answered by another replica is recorded at once, as cancelled and without tokens."""
    records = MemoryRecords()
    orphans = OrphanRecords("rt1", records.append, _lives, grace_s=60)
    for name in ("a", "b"):
        orphans.add(replace(_account(name, 2, LIVE), idempotency_value="digest"), connection_lost=False)
    orphans.record_answered_elsewhere("a")
    orphans.record_answered_elsewhere("nobody")
    async with asyncio.timeout(30):
        await records.written.wait()
    (record,) = records.records
    assert (record.request_id, record.outcome, record.runtime_id) == ("a", "cancelled", "rt1")
    assert (record.completion_tokens, record.prompt_tokens, record.device_us) == (0, 7, 500)
    assert record.once is msgspec.UNSET, "it is no charge, so it is one with none"
    assert len(orphans) == 1


async def test_claimed_record_waits_while_its_activator_lives() -> None:
    """A claimed record waits while its activator lives. A lock that can't be checked counts as alive."""
    alive, looks = True, 0

    def lives(_: str) -> bool:
        nonlocal looks
        looks += 1
        if alive:
            raise OSError
        return False

    records = MemoryRecords()
    orphans = OrphanRecords("rt1", records.append, lives, grace_s=0.001)
    orphans.add(_account("a"), connection_lost=True)
    orphans.leave_to_activator("a")
    orphans.add(_account("lost"), connection_lost=True)
    async with asyncio.timeout(30):
        await records.written.wait()
        while looks < 10:
            await asyncio.sleep(0.001)
    assert [record.request_id for record in records.records] == ["lost"]
    alive = False
    async with asyncio.timeout(30):
        while len(records.records) < 2:
            await asyncio.sleep(0.001)
    assert len(orphans) == 0


@pytest.mark.parametrize(
    ("remote_timeout_s", "want"),
    [
        pytest.param(3600.0, ["dead"], id="it asked a moment ago"),
        pytest.param(0.0, ["dead", "far"], id="it did not ask for a while"),
    ],
)
async def test_remote_activator_counts_as_alive_for_a_while(remote_timeout_s: float, want: list[str]) -> None:
    """A remote activator's spool can't be checked here, so its last request decides."""
    records = MemoryRecords()
    orphans = OrphanRecords("rt1", records.append, _lives, grace_s=0.001, remote_timeout_s=remote_timeout_s)
    orphans.record_remote_activator("activator-far")
    orphans.add(_account("far", activator="activator-far"), connection_lost=False)
    orphans.add(_account("dead"), connection_lost=False)
    async with asyncio.timeout(30):
        while len(records.records) < len(want):
            await asyncio.sleep(0.001)
    assert sorted(record.request_id for record in records.records) == want
    assert len(orphans) == 2 - len(want)


async def test_activators_on_other_hosts_are_bounded() -> None:
    """The remote activator heard longest ago is forgotten, and then counts as dead."""
    records = MemoryRecords()
    orphans = OrphanRecords("rt1", records.append, _lives, grace_s=0.001, remote_timeout_s=3600.0)
    for number in range(module.MAX_REMOTE_ACTIVATORS):
        orphans.record_remote_activator(f"activator-{number}")
    orphans.record_remote_activator("activator-new")
    orphans.add(_account("first", activator="activator-0"), connection_lost=False)
    orphans.add(_account("last", activator="activator-new"), connection_lost=False)
    async with asyncio.timeout(30):
        while not records.records:
            await asyncio.sleep(0.001)
    assert [record.request_id for record in records.records] == ["first"]


async def test_pending_records_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Above the limit the oldest record is written at once. The log names the limit, not a lost activator."""
    records = MemoryRecords()
    orphans = OrphanRecords("rt1", records.append, _lives, grace_s=60)
    for number in range(module.MAX_PENDING_RECORDS + 1):
        orphans.add(_account(f"r{number}"), connection_lost=True)
    async with asyncio.timeout(30):
        await records.written.wait()
    assert [record.request_id for record in records.records] == ["r0"]
    await orphans.flush()
    assert len(records.records) == module.MAX_PENDING_RECORDS + 1
    said = [record.message for record in caplog.records if record.name == module.__name__]
    assert said == ["too many requests without a record", *["the replica ends"] * module.MAX_PENDING_RECORDS]


async def test_failed_disk_loses_only_the_record() -> None:
    """The failure is logged, and the next record is written."""

    class Failing(MemoryRecords):
        async def append(self, make: Callable[[int], bytes], /) -> int:
            if not self.written.is_set():
                self.written.set()
                raise Refused(Unavailable("the disk"))
            return await super().append(make)

    records = Failing()
    orphans = OrphanRecords("rt1", records.append, _lives, grace_s=60)
    orphans.add(_account("a"), connection_lost=True)
    await orphans.flush()
    orphans.add(_account("b"), connection_lost=True)
    await orphans.flush()
    assert [record.request_id for record in records.records] == ["b"]


async def test_records_are_shipped_as_a_batch(tmp_path: Path) -> None:
    """Spooled records are posted as a body that decodes strictly as a RequestBatch."""
    posted: list[RequestRecord] = []

    done = asyncio.Event()

    async def post(payloads: Sequence[bytes]) -> None:
        posted.extend(decode(encode(batch_of(payloads)), RequestBatch).records)
        if len(posted) == 3:
            done.set()

    async with open_orphan_records(tmp_path, "rt1", post) as orphans:
        for name in "abc":
            orphans.add(_account(name), connection_lost=True)
        await orphans.flush()
        async with asyncio.timeout(30):
            await done.wait()
    assert [record.sequence for record in posted] == [1, 2, 3]
    assert {record.source for record in posted} == {"rt1"}


def test_unshipped_records_stay_for_recovery(tmp_path: Path) -> None:
    """Records that could not be shipped stay on disk under the runtime's id."""

    async def away(_: Sequence[bytes]) -> None:
        raise Refused(Unavailable("the control plane"))

    async def leave() -> None:
        async with open_orphan_records(tmp_path, "rt1", away) as orphans:
            orphans.add(_account("a"), connection_lost=True)

    recovered: list[str] = []

    async def back(payloads: Sequence[bytes]) -> None:
        recovered.extend(msgspec.json.decode(payload, type=RequestRecord).request_id for payload in payloads)

    asyncio.run(leave())
    (report,) = asyncio.run(recover(tmp_path, lambda _: back))
    assert report.source == "rt1"
    assert recovered == ["a"]


async def test_without_orphans_nothing_is_written(tmp_path: Path) -> None:
    """Without orphans there is no directory and no thread."""

    async def post(_: Sequence[bytes]) -> None:
        raise AssertionError

    async with open_orphan_records(tmp_path, "rt1", post):
        pass
    assert list(tmp_path.iterdir()) == []
