"""The read scheduler: slots per source, one queue per source, and no slot or place lost when a reader gives up."""

import asyncio
from dataclasses import dataclass

import pytest

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Cancelled
from tests.weightcache.kit import run_tasks
from weightcache.fetch.read_scheduler import ReadScheduler
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit, ChunkKey
from weightcache.sources.source import ReadSlot

CHUNK = 100


def key(name: str) -> ChunkKey:
    return "acme", name


class World:
    """Chunks whose reads wait until the test ends them. `begun` lists them in the order of their start."""

    def __init__(self, **limits: ChunkCountLimit) -> None:
        self.scheduler = ReadScheduler(limits)
        self.begun: list[str] = []
        self.refused: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def read(self, tier: str, name: str, nbytes: int = CHUNK) -> None:
        """Start a read, and let other tasks run."""
        self.gates[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._read(tier, name, nbytes))
        await run_tasks()

    async def end(self, name: str) -> None:
        self.gates[name].set()
        await run_tasks()

    async def _read(self, tier: str, name: str, nbytes: int) -> None:
        try:
            async with self.scheduler.hold_slot(tier, key(name), nbytes):
                self.begun.append(name)
                await self.gates[name].wait()
        except Refused as refused:
            if refused.failure == Cancelled():
                self.refused.append(name)


def wants(*names: str) -> dict[ChunkKey, int]:
    return {key(name): position for position, name in enumerate(names)}


@pytest.mark.parametrize(("slow", "quick"), [("store", "nvme"), ("nvme", "store")])
async def test_slow_source_does_not_delay_another(slow: str, quick: str) -> None:
    """One source's slots and queue are full, and the other source's read starts at once."""
    world = World(nvme=ChunkCountLimit(1), store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a", "b", "c"))
    for name in "ab":
        await world.read(slow, name)
    await world.read(quick, "c")
    assert world.begun == ["a", "c"]
    assert world.scheduler.running == {"nvme": 1, "store": 1}
    assert world.scheduler.queued == {slow: 1, quick: 0}


@dataclass
class InParts:
    """A limit of `limit_bytes` that grants at most forty bytes of a chunk at once."""

    limit_bytes: int

    def next_part_bytes(self, running_parts: int, running_bytes: int, remaining_bytes: int) -> int | None:
        part_bytes = min(40, remaining_bytes)
        return part_bytes if running_bytes + part_bytes <= self.limit_bytes else None


class Reader:
    """A reader of a chunk of a hundred bytes in parts. The test reports each part's arrival."""

    def __init__(self, scheduler: ReadScheduler, name: str, nbytes: int = CHUNK) -> None:
        self.parts: list[int] = []
        self.slot: ReadSlot | None = None
        self.gate = asyncio.Event()
        self.task = asyncio.create_task(self._read(scheduler, name, nbytes))

    async def _read(self, scheduler: ReadScheduler, name: str, nbytes: int) -> None:
        async with scheduler.hold_slot("store", key(name), CHUNK) as self.slot:
            while sum(self.parts) < nbytes:
                self.parts.append(await self.slot.request_part(nbytes - sum(self.parts)))
            await self.gate.wait()

    async def record_arrival(self, nbytes: int) -> None:
        assert self.slot is not None
        self.slot.record_arrival(nbytes)
        await run_tasks()


async def in_parts_of_40() -> tuple[ReadScheduler, Reader, Reader]:
    """Return a scheduler with room for one part, and two flows that each read a chunk of a hundred bytes."""
    scheduler = ReadScheduler({"store": InParts(40)})
    for flow in "ab":
        scheduler.enter(flow, wants(flow))
    first, second = Reader(scheduler, "a"), Reader(scheduler, "b")
    await run_tasks()
    return scheduler, first, second


async def test_chunks_alternate_part_by_part() -> None:
    """Two chunks alternate part by part within the limit, and all room is free at the end."""
    scheduler, first, second = await in_parts_of_40()
    assert (first.parts, second.parts) == ([40], [])
    for reader, other in ((first, second), (second, first)) * 2:
        parts_before = list(other.parts)
        await reader.record_arrival(20)
        assert other.parts == parts_before, "half a part frees no room"
        await reader.record_arrival(20)
        assert len(other.parts) == len(parts_before) + 1, "the other reader gets the next part"
    assert (first.parts, second.parts) == ([40, 40, 20], [40, 40, 20])
    assert (scheduler.running, scheduler.queued) == ({"store": 2}, {"store": 0})
    for reader in (first, second):
        reader.gate.set()
        await reader.task
    assert scheduler.running == {"store": 0}


async def test_unused_room_of_a_part_is_returned() -> None:
    """A reader that needs less than its first part returns the rest at once."""
    scheduler = ReadScheduler({"store": InParts(60)})
    for flow in "ab":
        scheduler.enter(flow, wants(flow))
    first = Reader(scheduler, "a", nbytes=20)
    second = Reader(scheduler, "b")
    await run_tasks()
    assert (first.parts, second.parts) == ([20], [40])
    for reader in (first, second):
        reader.task.cancel()
        await asyncio.wait({reader.task})
    assert scheduler.running == {"store": 0}


async def test_started_chunk_is_read_to_its_end() -> None:
    """A chunk of which a part was read is read to its end, out of turn, when no flow wants it any more."""
    scheduler, first, second = await in_parts_of_40()
    assert (first.parts, second.parts) == ([40], [])
    scheduler.leave("a")
    await run_tasks()
    assert (first.parts, second.parts) == ([40, 40, 20], [])
    await first.record_arrival(100)
    assert second.parts == [40]
    scheduler.leave("b")
    for reader in (first, second):
        reader.gate.set()
        await reader.task
    assert second.parts == [40, 40, 20]
    assert (scheduler.running, scheduler.queued) == ({"store": 0}, {"store": 0})


@pytest.mark.parametrize("moment", ["queued", "its part has just begun"])
async def test_cancellation_between_parts_frees_all_room(moment: str) -> None:
    """All room of the cancelled reader is free, and the other reader gets its place."""
    scheduler, first, second = await in_parts_of_40()
    if moment == "its part has just begun":
        scheduler.leave("b")
        await asyncio.wait({second.task})
        assert first.slot is not None
        first.slot.record_arrival(40)  # the reader has its next part, but has not run since
    first.task.cancel()
    await asyncio.wait({first.task})
    assert first.task.cancelled()
    await run_tasks()
    assert second.parts == ([40] if moment == "queued" else [])
    assert scheduler.running == {"store": len(second.parts)}
    second.task.cancel()
    await asyncio.wait({second.task})
    assert (scheduler.running, scheduler.queued) == ({"store": 0}, {"store": 0})


async def test_versions_take_turns() -> None:
    """The second version's first chunk does not wait for all chunks of the first version."""
    world = World(store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a0", "a1", "a2"))
    world.scheduler.enter("w", wants("b0", "b1"))
    for name in ("a0", "a1", "a2", "b0", "b1"):
        await world.read("store", name)
    for name in ("a0", "b0", "a1", "b1", "a2"):
        assert world.begun[-1] == name
        await world.end(name)


async def test_unwanted_queued_chunk_is_refused() -> None:
    """A queued chunk is refused, a started one goes on, and one that another flow wants keeps its place."""
    world = World(store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a", "b", "both"))
    world.scheduler.enter("w", wants("both"))
    for name in ("a", "b", "both"):
        await world.read("store", name)
    world.scheduler.leave("v")
    await run_tasks()
    assert world.refused == ["b"]
    await world.read("store", "late")  # no flow wants it
    assert world.refused == ["b", "late"]
    await world.end("a")
    assert world.begun == ["a", "both"]


async def test_chunk_wanted_again_at_once_keeps_its_place() -> None:
    """The last flow leaves, and another one enters before the chunk's reader runs: the chunk stays queued."""
    world = World(store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a", "b"))
    for name in ("a", "b"):
        await world.read("store", name)
    world.scheduler.leave("v")
    world.scheduler.enter("w", wants("b"))
    await run_tasks()
    assert world.refused == []
    await world.end("a")
    assert world.begun == ["a", "b"]


@pytest.mark.parametrize("moment", ["queued", "its turn has just come", "its turn comes just then"])
async def test_cancelled_read_loses_no_slot(moment: str) -> None:
    """Neither a slot nor a place in the queue is lost, whenever the cancellation comes."""
    world = World(store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a", "b", "c"))
    for name in "abc":
        await world.read("store", name)
    if moment == "its turn has just come":
        world.gates["a"].set()
        await asyncio.sleep(0)  # `a` has ended, and `b` has its slot but has not run
    world.tasks["b"].cancel()
    if moment == "its turn comes just then":
        world.scheduler.enter("w", {})
        world.scheduler.leave("w")  # starts the next read before `b` has run
    await run_tasks()
    assert world.tasks["b"].cancelled()
    await world.end("a")
    assert world.begun == ["a", "c"]
    await world.end("c")
    assert (world.scheduler.running, world.scheduler.queued) == ({"store": 0}, {"store": 0})
