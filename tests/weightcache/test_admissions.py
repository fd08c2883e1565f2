"""Write-behind: loads come first, what waits is bounded, memory that is needed is let go; all of it is counted."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from blobstore.memory import MemoryStore
from contracts.errors import Refused
from contracts.manifest import PAGE
from contracts.traffic_errors import Overloaded
from tests.weightcache.kit import HUGE, TENANT
from weightcache.admissions import Admissions
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.fetching import Fetcher
from weightcache.nvme import NvmeTier
from weightcache.policy.disk import DiskIndex, may_begin_write
from weightcache.policy.host import HostIndex, Reservation
from weightcache.remote import StoreTier
from weightcache.slabs import SlabPool
from weightcache.sources import is_digest_of
from weightcache.verifying import Verifier

SLABS = 4


@pytest.mark.parametrize(
    ("writing", "loading", "want"),
    [
        pytest.param(0, False, True, id="the disk is idle"),
        pytest.param(1, False, True, id="two at once"),
        pytest.param(2, False, False, id="no more"),
        pytest.param(0, True, True, id="one beside loads"),
        pytest.param(1, True, False, id="not two"),
    ],
)
def test_at_once(writing: int, loading: bool, want: bool) -> None:
    """Whether one more is written."""
    assert may_begin_write(writing, loading=loading) is want


class GatedDisk(NvmeTier):
    """A disk that writes when it is told to."""

    def __init__(self, threads: ThreadPoolExecutor, verifier: Verifier) -> None:
        super().__init__(Path("/nonexistent"), DiskIndex(SLABS * HUGE), threads, time.time, verifier, 1)
        self.writes: list[str] = []
        self.gate = asyncio.Event()

    async def admit(self, tenant: str, digest: str, data: memoryview) -> bool:
        self.writes.append(digest)
        await self.gate.wait()
        return True


class World:
    """An arena of four slabs, over a disk that writes when it is told to."""

    def __init__(self, arena: Arena, threads: ThreadPoolExecutor) -> None:
        self.arena = arena
        self.counters = Counters()
        self.loading = False
        verifier = Verifier(threads, is_digest_of, self.counters)
        disk, store = GatedDisk(threads, verifier), StoreTier(MemoryStore())
        self.writes, self.gate = disk.writes, disk.gate
        below = Fetcher((store,), verifier, self.counters)
        self.admissions = Admissions(arena, disk, below, store, self.counters, lambda: self.loading)

    async def reserve(self, *names: str, length: int = HUGE) -> Reservation:
        """Places for these, the memory being there."""
        reservation = self.arena.reserve(TENANT, [(name, length) for name in names], 0.0)
        for place in reservation.places.values():
            await self.arena.view(place)
        return reservation

    async def load(self, *names: str, length: int = PAGE) -> None:
        """As the loader does: bring these, offer them, and let the version go."""
        reservation = await self.reserve(*names, length=length)
        for name in reservation.load:
            self.arena.index.mark_ready(TENANT, name)
            self.admissions.offer(TENANT, name, reservation.places[name])
        self.arena.unpin(reservation.slabs)

    async def begun(self, count: int) -> None:
        while len(self.writes) < count:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def opened() -> AsyncIterator[World]:
    with ThreadPoolExecutor(1) as threads:
        arena = Arena(HostIndex(HUGE, SLABS), SlabPool(HUGE, SLABS, threads))
        world = World(arena, threads)
        try:
            yield world
        finally:
            await world.admissions.close()
            await arena.close()


def run(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), opened() as world:
            await scenario(world)

    asyncio.run(main())


def test_all_are_written() -> None:
    """In their order, two at a time, and the slabs are free afterwards."""

    async def scenario(world: World) -> None:
        await world.load("a", "b", "c")
        await world.begun(2)
        assert world.writes == ["a", "b"]
        assert (world.admissions.waiting, world.arena.index.busy_count) == (3, 1)
        world.gate.set()
        await world.admissions.settle()
        assert world.writes == ["a", "b", "c"]
        assert world.admissions.waiting == 0
        assert world.arena.index.busy_count == 0
        assert world.counters.admitted_chunks == 3

    run(scenario)


def test_loads_come_first() -> None:
    """While the disk is read, one is written at a time."""

    async def scenario(world: World) -> None:
        world.loading = True
        await world.load("a", "b")
        await world.begun(1)
        await asyncio.sleep(0)
        assert world.writes == ["a"]
        world.gate.set()
        await world.admissions.settle()
        assert world.writes == ["a", "b"]

    run(scenario)


def test_memory_that_is_needed() -> None:
    """A version that needs slabs of those that wait gets as many as it needs, of those that wait longest."""

    async def scenario(world: World) -> None:
        world.loading = True
        for name in ("a", "b", "c", "d"):
            await world.load(name, length=HUGE)
        await world.begun(1)
        world.arena.on_full = lambda: False
        with pytest.raises(Refused) as refused:
            await world.reserve("x", "y")
        assert isinstance(refused.value.failure, Overloaded), "the control: without it there is no room"
        world.arena.on_full = world.admissions.shed
        reservation = await world.reserve("x", "y")
        assert (world.counters.unkept_chunks, world.admissions.waiting) == (2, 2)
        with pytest.raises(Refused):  # what is being written stays
            await world.reserve("v", "w")
        for name in reservation.load:
            world.arena.index.drop(TENANT, name)
        world.arena.unpin(reservation.slabs)
        world.gate.set()
        await world.admissions.settle()
        assert world.writes == ["a"]
        assert world.counters.unkept_chunks == 3
        assert world.arena.index.busy_count == 0

    run(scenario)


def test_closing_ends_all() -> None:
    """What is written is cancelled, what waits is let go."""

    async def scenario(world: World) -> None:
        await world.load("a", "b", "c")
        await world.begun(2)
        await world.admissions.close()
        assert world.arena.index.busy_count == 0
        assert world.writes == ["a", "b"]

    run(scenario)
