"""Reads of the store in hedged ranges. After a cancellation or failure, nothing writes to the chunk's memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kelvin.blobstore.blob_store import BlobUnavailable
from tests.eventually import eventually
from tests.weightcache.kit import run_tasks
from weightcache.counters import Counters
from weightcache.sources.policy.bdp_window import MIN_SAMPLE_BYTES, BdpWindow
from weightcache.sources.policy.read_hedging import MIN_SAMPLES, HedgeRule, ReadHedging
from weightcache.sources.source import UNLIMITED_READ_SLOT, ReadSlot
from weightcache.sources.store_ranges import StoreRanges

NBYTES = 1000
EAGER = HedgeRule(share=1.0, floor_s=0.001, at_once=2)  # a floor of one millisecond, so that a held read is late
BODY = bytes(range(250)) * 40


class Held:
    """A store whose reads wait until the test ends them. `writing` counts reads that may still write."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, asyncio.Future[None]]] = []
        self.writing = 0
        self.body = BODY
        self.stubborn = False  # whether a cancelled read writes before it ends

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reads.append((offset, gate))
        self.writing += 1
        try:
            await gate
            into[:] = self.body[offset : offset + into.nbytes]
        except asyncio.CancelledError:
            if self.stubborn:
                await asyncio.sleep(0.01)
                into[:] = b"x" * into.nbytes
            raise
        finally:
            self.writing -= 1

    def end(self, number: int) -> None:
        self.reads[number][1].set_result(None)

    def fail(self, number: int) -> None:
        self.reads[number][1].set_exception(BlobUnavailable("made up"))

    async def asked(self, count: int) -> None:
        await eventually(lambda: len(self.reads) >= count)


class World:
    """Ranges over a held store, with enough reads recorded that the next one can be late."""

    def __init__(self, rule: HedgeRule = EAGER, slot: ReadSlot = UNLIMITED_READ_SLOT) -> None:
        self.store = Held()
        self.slot = slot
        self.counters = Counters()
        self.hedging = ReadHedging(rule)
        self.line = BdpWindow(8)
        self.ranges = StoreRanges(self.store, self.hedging, self.line, self.counters)
        self.into = bytearray(NBYTES)
        for _ in range(MIN_SAMPLES):
            self.hedging.begin_read(NBYTES)
            self.hedging.record_read(NBYTES, 0.0001)

    def read(self, offset: int = 0) -> asyncio.Task[None]:
        return asyncio.create_task(self.ranges.reader_for(self.slot).read_into("k", offset, memoryview(self.into)))

    @property
    def measured(self) -> bool:
        return self.line.bytes_per_s is not None

    @property
    def counted(self) -> tuple[int, int]:
        return self.counters.hedges, self.counters.hedges_won


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Assert that no task of the block outlives it."""
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("winner", [0, 1], ids=["the primary read wins", "the hedge wins"])
async def test_first_successful_read_wins(winner: int) -> None:
    """The losing read has ended before the call returns."""

    async with nothing_left():
        world = World()
        read = world.read()
        await world.store.asked(2)
        world.store.end(winner)
        await read
        assert bytes(world.into) == BODY[:NBYTES]
        assert world.store.writing == 0
        assert world.counted == (1, winner)


async def test_loser_writes_nothing_afterwards() -> None:
    """A loser that writes after its cancellation is waited for before the winner's bytes are stored."""

    async with nothing_left():
        world = World()
        world.store.stubborn = True
        read = world.read()
        await world.store.asked(2)
        world.store.end(1)
        await read
        assert world.store.writing == 0
        assert bytes(world.into) == BODY[:NBYTES]


@pytest.mark.parametrize(
    ("failing", "well"), [pytest.param(0, 1, id="the primary read fails"), pytest.param(1, 0, id="the hedge fails")]
)
async def test_failed_read_leaves_the_other_running(failing: int, well: int) -> None:
    async with nothing_left():
        world = World()
        read = world.read()
        await world.store.asked(2)
        world.store.fail(failing)
        await run_tasks()
        assert not read.done()
        world.store.end(well)
        await read
        assert bytes(world.into) == BODY[:NBYTES]


async def test_two_failed_reads_fail_once() -> None:
    async with nothing_left():
        world = World()
        read = world.read()
        await world.store.asked(2)
        world.store.fail(1)
        world.store.fail(0)
        with pytest.raises(BlobUnavailable):
            await read


@pytest.mark.parametrize("reads_before_cancel", [1, 2], ids=["without a hedge", "with a hedge"])
async def test_cancellation_ends_both_reads(reads_before_cancel: int) -> None:
    """All reads end before the call does, and the hedge's place is free again."""

    async with nothing_left():
        world = World() if reads_before_cancel == 2 else World(HedgeRule(share=0.0))
        world.store.stubborn = True
        for _ in range(5):
            reads = len(world.store.reads)
            read = world.read()
            await world.store.asked(reads + reads_before_cancel)
            read.cancel()
            await asyncio.wait({read})
            assert read.cancelled()
            assert world.store.writing == 0


async def test_hedges_stay_within_their_budget() -> None:
    """Two hedges run at once at most, and all stay within the share."""

    async with nothing_left():
        world = World(HedgeRule(share=0.05, floor_s=0.001, at_once=2))
        reads = [world.read() for _ in range(60)]
        await world.store.asked(60 + 2)
        await asyncio.sleep(0.02)
        assert len(world.store.reads) == 60 + 2, "two at once, though four are saved up"
        for number in range(len(world.store.reads)):
            world.store.end(number)
        await asyncio.gather(*reads)
        assert world.counters.hedges <= 0.05 * (60 + MIN_SAMPLES)


class InParts:
    """A read slot that grants 300 bytes a part. With `waiting`, grants wait until `go` is set."""

    def __init__(self, *, waiting: bool = False) -> None:
        self.arrived_bytes = 0
        self.go = asyncio.Event()
        if not waiting:
            self.go.set()

    async def request_part(self, nbytes: int) -> int:
        await self.go.wait()
        return min(300, nbytes)

    def record_arrival(self, nbytes: int) -> None:
        self.arrived_bytes += nbytes


async def test_ranges_are_read_concurrently() -> None:
    """A chunk is read in concurrent ranges, as its slot grants them. The first that fails cancels the others."""

    async with nothing_left():
        slot = InParts()
        world = World(HedgeRule(share=0.0), slot)
        read = world.read(offset=7)
        await world.store.asked(4)
        assert [offset for offset, _ in world.store.reads] == [7, 307, 607, 907]
        for number in (3, 1, 0, 2):
            world.store.end(number)
        await read
        assert bytes(world.into) == BODY[7 : 7 + NBYTES]
        assert slot.arrived_bytes == NBYTES
        read = world.read()
        await world.store.asked(8)
        world.store.fail(5)
        with pytest.raises(BlobUnavailable):
            await read
        assert world.store.writing == 0
        assert slot.arrived_bytes == NBYTES, "a failed read counted bytes"


async def test_reads_are_measured() -> None:
    """The window measures successful reads only. A read that waits for its slot is none."""

    async with nothing_left():
        world = World(HedgeRule(share=0.0), InParts(waiting=True))
        world.into = bytearray(MIN_SAMPLE_BYTES)
        read = world.read()
        await run_tasks()
        assert world.store.reads == []
        read.cancel()
        await asyncio.wait({read})
        world.slot = UNLIMITED_READ_SLOT
        read = world.read()
        await world.store.asked(1)
        await run_tasks()
        assert not world.measured
        world.store.fail(0)
        with pytest.raises(BlobUnavailable):
            await read
        assert not world.measured
        world.store.body = bytes(MIN_SAMPLE_BYTES)
        read = world.read()
        await world.store.asked(2)
        await asyncio.sleep(0.01)
        world.store.end(1)
        await read
        assert 0 < (world.line.bytes_per_s or 0) < MIN_SAMPLE_BYTES / 0.005
