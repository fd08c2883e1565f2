"""Records arrive in order, at least once, in bounded batches. A record is kept until it is acknowledged."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.process.loops import LoopHealth, Loops
from kelvin.spool.recent_records import RECENT_BYTES
from kelvin.spool.segment_disk import segments
from kelvin.spool.segment_reader import SegmentReader, read_position
from kelvin.spool.shipper import MAX_RECORDS, Shipper
from kelvin.spool.spool import Spool
from tests.kelvin.spool.test_segment_writer import make

DEADLINE_S = 20.0
AWAY = Refused(Unavailable("control plane"))


class Receiver:
    """A receiver that refuses the first `refusals` posts. In every second refusal, it keeps the records."""

    def __init__(self, refusals: int = 0, error: Exception = AWAY) -> None:
        self.taken: list[bytes] = []
        self.batches: list[int] = []
        self.refusals = refusals
        self.error = error
        self.more = asyncio.Event()

    async def post(self, records: Sequence[bytes]) -> None:
        if self.refusals:
            self.refusals -= 1
            if self.refusals % 2:
                self.taken += records  # only the response is lost, not the records
            raise self.error
        self.taken += records
        self.batches.append(len(records))
        self.more.set()

    def first_times(self) -> list[bytes]:
        """Return the records without repeats."""
        return list(dict.fromkeys(self.taken))


def quick(spool: Spool, receiver: Receiver) -> Shipper:
    """Return a shipper without pauses."""
    return Shipper(spool, receiver.post, linger_s=0.0, backoff_s=0.0, max_backoff_s=0.0)


def soon() -> Deadline:
    return Deadline.after(DEADLINE_S, time.monotonic())


async def test_everything_arrives_in_order_and_segments_go(tmp_path: Path) -> None:
    """In the background, batches stay within the limit, acknowledged segments are deleted, and the position is kept."""
    spool, receiver = Spool.open(tmp_path, "a-1", segment_bytes=300_000), Receiver()
    async with quick(spool, receiver) as shipper:
        await asyncio.gather(*(spool.append(make("x" * 1000)) for _ in range(2000)))
        assert await shipper.flush(soon())
        assert shipper.backlog == 0
    assert receiver.taken == [make("x" * 1000)(sequence) for sequence in range(1, 2001)]
    assert max(receiver.batches) <= MAX_RECORDS
    assert len(segments(spool.path)) == 1
    assert read_position(spool.path) == 2000
    spool.close()
    assert not spool.path.exists()


async def test_partial_batch_waits_for_more_records(tmp_path: Path) -> None:
    """The shipper lingers after a full batch too. Otherwise a steady flow would be posted in small batches."""
    spool, receiver = Spool.open(tmp_path, "a-1"), Receiver()
    await asyncio.gather(*(spool.append(make("x")) for _ in range(MAX_RECORDS + 1)))
    async with Shipper(spool, receiver.post, linger_s=3600.0) as shipper, asyncio.timeout(DEADLINE_S):
        await receiver.more.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert receiver.batches == [MAX_RECORDS]
        assert await shipper.flush(soon())
        assert receiver.batches == [MAX_RECORDS, 1]
    spool.close()


async def test_background_loop_ships_by_itself(tmp_path: Path) -> None:
    """A commit wakes the shipper."""
    spool, receiver = Spool.open(tmp_path, "a-1"), Receiver()
    async with quick(spool, receiver):
        for _ in range(3):
            receiver.more.clear()
            await spool.append(make("x"))
            async with asyncio.timeout(DEADLINE_S):
                await receiver.more.wait()
    assert receiver.taken == [b"1:x", b"2:x", b"3:x"]
    spool.close()


@pytest.mark.parametrize("error", [AWAY, OSError("full")], ids=["refused", "a disk"])
async def test_a_receiver_that_is_away_loses_nothing(tmp_path: Path, error: Exception) -> None:
    """Refused posts are repeated in order. Without repeats, each record arrived once."""
    spool, receiver = Spool.open(tmp_path, "a-1"), Receiver(7, error)
    async with quick(spool, receiver) as shipper:
        for _ in range(20):
            await spool.append(make("x"))
        assert await shipper.flush(soon())
    assert receiver.first_times() == [make("x")(sequence) for sequence in range(1, 21)]
    assert shipper.failures == 0
    spool.close()


async def test_flush_ends_at_its_deadline(tmp_path: Path) -> None:
    """The records stay for a recovery."""
    spool, receiver = Spool.open(tmp_path, "a-1"), Receiver(refusals=10**9)
    await spool.append(make("x"))
    shipper = quick(spool, receiver)
    assert not await shipper.flush(Deadline.after(0.05, time.monotonic()))
    assert shipper.backlog == 1
    assert shipper.failures > 0
    spool.close()
    assert segments(spool.path) == [1]


def test_pauses_double_up_to_the_cap_and_are_jittered(tmp_path: Path) -> None:
    """A pause is between half of the doubled value and all of it."""
    spool, receiver = Spool.open(tmp_path, "a-1"), Receiver()
    low = Shipper(spool, receiver.post, backoff_s=0.1, max_backoff_s=3.0, jitter=lambda: 0.0)
    high = Shipper(spool, receiver.post, backoff_s=0.1, max_backoff_s=3.0, jitter=lambda: 1.0)
    seen = []
    for failures in (0, 1, 2, 3, 4, 5, 60):
        low.failures = high.failures = failures
        seen.append((low._pause_s(), high._pause_s()))
    assert [round(pause, 3) for _, pause in seen] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0]
    assert all(half == pytest.approx(full / 2) for half, full in seen)
    spool.close()


async def test_one_large_record_is_not_held_back_by_the_batch_limit(tmp_path: Path) -> None:
    """A batch ends before it exceeds the limit, but has at least one record."""
    spool, receiver = Spool.open(tmp_path, "a-1"), Receiver()
    for _ in range(9):
        await spool.append(lambda sequence: bytes([sequence]) * 200_000)
    assert await quick(spool, receiver).flush(soon())
    assert receiver.batches == [5, 4]
    spool.close()


async def test_cancelling_a_post_repeats_it_later(tmp_path: Path) -> None:
    """A post that is cancelled on leaving the block leaks no task and acknowledges nothing."""
    spool, entered, tasks = Spool.open(tmp_path, "a-1"), asyncio.Event(), asyncio.all_tasks()

    async def hang(_: Sequence[bytes]) -> None:
        entered.set()
        await asyncio.Event().wait()

    async with Shipper(spool, hang, linger_s=0.0):
        await spool.append(make("x"))
        async with asyncio.timeout(DEADLINE_S):
            await entered.wait()
    assert asyncio.all_tasks() == tasks
    assert spool._listeners == {}
    receiver = Receiver()
    assert await quick(spool, receiver).flush(soon())
    assert receiver.taken == [b"1:x"]
    spool.close()


async def test_damage_pauses_and_the_next_segment_goes_on(tmp_path: Path) -> None:
    """An unreadable record stays in the backlog, without a busy loop, until the next segment exists."""
    spool, receiver = Spool.open(tmp_path, "a-1", segment_bytes=4096, recent_bytes=0), Receiver()
    assert await spool.append(make("x" * 3000)) == 1
    (path,) = spool.path.glob("*.seg")
    path.write_bytes(bytes(4096))
    shipper = quick(spool, receiver)
    assert not await shipper.flush(Deadline.after(0.05, time.monotonic()))
    assert (shipper.backlog, receiver.taken) == (1, [])
    assert shipper.failures > 0
    assert await spool.append(make("y" * 3000)) == 2
    assert await shipper.flush(soon())
    assert receiver.taken == [make("y" * 3000)(2)]
    spool.close()


@given(
    steps=st.lists(st.sampled_from(["append", "ship", "refuse", "restart"]), max_size=40),
    size=st.integers(min_value=1, max_value=2000),
    recent_bytes=st.sampled_from([0, 1500, RECENT_BYTES]),
)
@example(
    steps=["ship", "append", "restart", "append", "refuse"], size=1, recent_bytes=0
)  # a refused batch that spans two segments
@settings(max_examples=80)
async def test_any_order_of_appends_and_failures_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], size: int, recent_bytes: int
) -> None:
    """In any order of events, a last flush completes exactly the sequence 1..n, from memory, disk or both."""
    root = tmp_path_factory.mktemp("spool")

    def opened() -> Spool:
        return Spool.open(root, "a-1", segment_bytes=4096, recent_bytes=recent_bytes)

    spool, receiver, appended = opened(), Receiver(), 0
    # A spool without unshipped records is removed at close, with its sequence, so keep one record.
    for step in ["append", *steps]:
        if step == "append":
            appended += 1
            assert await spool.append(make("x" * size)) == appended
        elif step == "restart":
            if spool.tail.acknowledged < spool.committed:
                spool.close()
                spool = opened()
        elif spool.tail.acknowledged < spool.committed:
            receiver.refusals = int(step == "refuse")
            shipper = quick(spool, receiver)
            await shipper._try_ship()
            assert shipper.backlog == spool.committed - spool.tail.acknowledged
    receiver.refusals = 0
    assert await quick(spool, receiver).flush(soon())
    spool._journal.check_integrity()
    spool.close()
    assert receiver.first_times() == [make("x" * size)(sequence) for sequence in range(1, appended + 1)]


async def test_shipping_defect_is_counted_by_its_loop(tmp_path: Path) -> None:
    """An unexpected exception ends the shipper's run. Its loop counts the error and restarts it."""
    spool, receiver, health = Spool.open(tmp_path, "a-1"), Receiver(), LoopHealth()

    async def post(records: Sequence[bytes]) -> None:
        if not health.errors:
            raise KeyError("a defect")
        await receiver.post(records)

    await spool.append(make("x"))
    async with Loops(health) as loops:
        loops.start("shipper", Shipper(spool, post, linger_s=0.0).run)
        async with asyncio.timeout(DEADLINE_S):
            await receiver.more.wait()
    assert health.errors == {"shipper": 1}
    spool.close()


async def test_defect_ends_no_drain(tmp_path: Path) -> None:
    """`flush` returns False, so that a drain continues."""

    async def post(_: Sequence[bytes]) -> None:
        raise KeyError("a defect")

    spool = Spool.open(tmp_path, "a-1")
    await spool.append(make("x"))
    assert not await Shipper(spool, post).flush(soon())
    spool.close()


async def test_slow_disk_holds_up_no_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the position is being written, the event loop continues. A cancelled shipper ends once the disk is done."""
    disk_done, writes = threading.Event(), threading.Event()
    acknowledge = SegmentReader.acknowledge

    def slow(tail: SegmentReader, last: int) -> None:
        writes.set()
        assert disk_done.wait(DEADLINE_S)
        acknowledge(tail, last)

    monkeypatch.setattr(SegmentReader, "acknowledge", slow)

    spool, receiver = Spool.open(tmp_path, "a-1"), Receiver()
    async with quick(spool, receiver):
        await spool.append(make("x"))
        await receiver.more.wait()
        while not writes.is_set():
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.01, disk_done.set)  # only a running event loop can release the disk
    assert read_position(spool.path) == 1
    spool.close()
