"""Turns: as many as a source allows, a queue for each source, and nobody who gives up keeps a slot or a place."""

import asyncio
from dataclasses import dataclass

import pytest

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Cancelled
from weightcache.fetch.read_scheduler import ReadScheduler
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit, Key
from weightcache.sources.source import ReadSlot

CHUNK = 100


def key(name: str) -> Key:
    return "acme", name


class World:
    """Chunks that are read until they are let go, and an account of those that began."""

    def __init__(self, **limits: ChunkCountLimit) -> None:
        self.scheduler = ReadScheduler(limits)
        self.begun: list[str] = []
        self.refused: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def read(self, tier: str, name: str, nbytes: int = CHUNK) -> None:
        """Begin, and let others do what they would."""
        self.gates[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._read(tier, name, nbytes))
        await settled()

    async def end(self, name: str) -> None:
        self.gates[name].set()
        await settled()

    async def _read(self, tier: str, name: str, nbytes: int) -> None:
        try:
            async with self.scheduler.hold_slot(tier, key(name), nbytes):
                self.begun.append(name)
                await self.gates[name].wait()
        except Refused as refused:
            if refused.failure == Cancelled():
                self.refused.append(name)


async def settled() -> None:
    """Whatever can go on has gone on."""
    for _ in range(5):
        await asyncio.sleep(0)


def wants(*names: str) -> dict[Key, int]:
    return {key(name): position for position, name in enumerate(names)}


@pytest.mark.parametrize(("slow", "quick"), [("store", "nvme"), ("nvme", "store")])
async def test_slow_source_keeps_nobody_from_another(slow: str, quick: str) -> None:
    """Its slots are full and its queue is long; the other source's chunk begins at once."""
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
    """A room for so many bytes, that gives forty of a chunk at once."""

    most: int

    def part(self, parts: int, nbytes: int, left: int) -> int | None:
        part = min(40, left)
        return part if nbytes + part <= self.most else None


class Reader:
    """Reads a chunk of a hundred bytes in parts, each of which comes when told."""

    def __init__(self, scheduler: ReadScheduler, name: str, nbytes: int = CHUNK) -> None:
        self.parts: list[int] = []
        self.turn: ReadSlot | None = None
        self.gate = asyncio.Event()
        self.task = asyncio.create_task(self._read(scheduler, name, nbytes))

    async def _read(self, scheduler: ReadScheduler, name: str, nbytes: int) -> None:
        async with scheduler.hold_slot("store", key(name), CHUNK) as self.turn:
            while sum(self.parts) < nbytes:
                self.parts.append(await self.turn.part(nbytes - sum(self.parts)))
            await self.gate.wait()

    async def record_arrival(self, nbytes: int) -> None:
        assert self.turn is not None
        self.turn.record_arrival(nbytes)
        await settled()


async def in_parts_of_40() -> tuple[ReadScheduler, Reader, Reader]:
    """Two flows that each read a chunk of a hundred, and one part of which there is room for."""
    scheduler = ReadScheduler({"store": InParts(40)})
    for flow in "ab":
        scheduler.enter(flow, wants(flow))
    one, two = Reader(scheduler, "a"), Reader(scheduler, "b")
    await settled()
    return scheduler, one, two


async def test_in_parts() -> None:
    """Two chunks take turns part by part, within the room that there is; all of it is free again at the end."""
    scheduler, one, two = await in_parts_of_40()
    assert (one.parts, two.parts) == ([40], [])
    for reader, other in ((one, two), (two, one)) * 2:
        already = list(other.parts)
        await reader.record_arrival(20)
        assert other.parts == already, "half a part is none"
        await reader.record_arrival(20)
        assert len(other.parts) == len(already) + 1, "it is the other's turn"
    assert (one.parts, two.parts) == ([40, 40, 20], [40, 40, 20])
    assert (scheduler.running, scheduler.queued) == ({"store": 2}, {"store": 0})
    for reader in (one, two):
        reader.gate.set()
        await reader.task
    assert scheduler.running == {"store": 0}


async def test_less_than_a_part() -> None:
    """What of the first part there is nothing to read for is given back at once."""
    scheduler = ReadScheduler({"store": InParts(60)})
    for flow in "ab":
        scheduler.enter(flow, wants(flow))
    one = Reader(scheduler, "a", nbytes=20)
    two = Reader(scheduler, "b")
    await settled()
    assert (one.parts, two.parts) == ([20], [40])
    for reader in (one, two):
        reader.task.cancel()
        await asyncio.wait({reader.task})
    assert scheduler.running == {"store": 0}


async def test_what_has_begun_runs_to_its_end() -> None:
    """A chunk of which a part is here is read to the end, out of turn, when nobody wants it any more."""
    scheduler, one, two = await in_parts_of_40()
    assert (one.parts, two.parts) == ([40], [])
    scheduler.leave("a")
    await settled()
    assert (one.parts, two.parts) == ([40, 40, 20], [])
    await one.record_arrival(100)
    assert two.parts == [40]
    scheduler.leave("b")
    for reader in (one, two):
        reader.gate.set()
        await reader.task
    assert two.parts == [40, 40, 20]
    assert (scheduler.running, scheduler.queued) == ({"store": 0}, {"store": 0})


@pytest.mark.parametrize("moment", ["queued", "its part has just begun"])
async def test_cancelled_between_parts(moment: str) -> None:
    """All that it had is free again, and its place is another's."""
    scheduler, one, two = await in_parts_of_40()
    if moment == "its part has just begun":
        scheduler.leave("b")
        await asyncio.wait({two.task})
        assert one.turn is not None
        one.turn.record_arrival(40)  # it has yet to hear of its next one
    one.task.cancel()
    await asyncio.wait({one.task})
    assert one.task.cancelled()
    await settled()
    assert two.parts == ([40] if moment == "queued" else [])
    assert scheduler.running == {"store": len(two.parts)}
    two.task.cancel()
    await asyncio.wait({two.task})
    assert (scheduler.running, scheduler.queued) == ({"store": 0}, {"store": 0})


async def test_versions_take_turns() -> None:
    """The second version's first chunk does not wait for all of the first's."""
    world = World(store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a0", "a1", "a2"))
    world.scheduler.enter("w", wants("b0", "b1"))
    for name in ("a0", "a1", "a2", "b0", "b1"):
        await world.read("store", name)
    for name in ("a0", "b0", "a1", "b1", "a2"):
        assert world.begun[-1] == name
        await world.end(name)


async def test_unwanted_queued_chunk_is_refused() -> None:
    """What waits is refused, what has begun goes on; what another wants too keeps its place."""
    world = World(store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a", "b", "both"))
    world.scheduler.enter("w", wants("both"))
    for name in ("a", "b", "both"):
        await world.read("store", name)
    world.scheduler.leave("v")
    await settled()
    assert world.refused == ["b"]
    await world.read("store", "late")  # nobody ever wanted it
    assert world.refused == ["b", "late"]
    await world.end("a")
    assert world.begun == ["a", "both"]


async def test_wanted_again_in_the_same_instant() -> None:
    """The last one leaves, another comes before the chunk has heard of it: it is queued, not refused."""
    world = World(store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a", "b"))
    for name in ("a", "b"):
        await world.read("store", name)
    world.scheduler.leave("v")
    world.scheduler.enter("w", wants("b"))
    await settled()
    assert world.refused == []
    await world.end("a")
    assert world.begun == ["a", "b"]


@pytest.mark.parametrize("moment", ["queued", "its turn has just come", "its turn comes just then"])
async def test_cancelled(moment: str) -> None:
    """Neither slot nor place is lost, whenever it happens."""
    world = World(store=ChunkCountLimit(1))
    world.scheduler.enter("v", wants("a", "b", "c"))
    for name in "abc":
        await world.read("store", name)
    if moment == "its turn has just come":
        world.gates["a"].set()
        await asyncio.sleep(0)  # `a` has ended, `b` has yet to hear of its turn
    world.tasks["b"].cancel()
    if moment == "its turn comes just then":
        world.scheduler.enter("w", {})
        world.scheduler.leave("w")  # looks for the next, while `b` has yet to hear of its end
    await settled()
    assert world.tasks["b"].cancelled()
    await world.end("a")
    assert world.begun == ["a", "c"]
    await world.end("c")
    assert (world.scheduler.running, world.scheduler.queued) == ({"store": 0}, {"store": 0})
