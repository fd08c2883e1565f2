"""Writes to NVMe: loads come first, waiting chunks are bounded by memory, and chunks that must be kept are."""

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.contracts.artifact_errors import ChunkMissing
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Overloaded
from tests.eventually import eventually
from tests.weightcache.kit import (
    HUGE,
    TENANT,
    TIMEOUT_S,
    CountingStore,
    make_store_tier,
    make_version,
    open_test_cache,
    publish,
    run_tasks,
    settings_of,
)
from weightcache.app.cache import Cache
from weightcache.counters import Counters
from weightcache.fetch.fetcher import Fetcher
from weightcache.fetch.nvme_admission import NvmeAdmission
from weightcache.host.arena import Arena
from weightcache.host.policy.host_index import HostIndex, Reservation
from weightcache.host.slab_pool import SlabPool
from weightcache.nvme.chunk_files import ChunkFiles
from weightcache.nvme.disk_index_policy import DiskIndex, may_begin_write
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.sources.source import is_digest_of
from weightcache.sources.verifier import Verifier

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
def test_concurrent_writes_are_bounded(writing: int, loading: bool, want: bool) -> None:
    """Two chunks are written at once, or one during loads."""
    assert may_begin_write(writing, is_disk_read=loading) is want


class GatedDisk(NvmeTier):
    """A disk whose writes wait for `gate`."""

    def __init__(self, threads: ThreadPoolExecutor, verifier: Verifier) -> None:
        super().__init__(Path("/nonexistent"), DiskIndex(SLABS * HUGE), threads, time.time, verifier, 1)
        self.writes: list[str] = []
        self.gate = asyncio.Event()

    async def admit(self, tenant: str, digest: str, data: memoryview) -> bool:
        self.writes.append(digest)
        await self.gate.wait()
        return True


class World:
    """An arena of four slabs over a disk whose writes wait for `gate`."""

    def __init__(self, arena: Arena, threads: ThreadPoolExecutor) -> None:
        self.arena = arena
        self.counters = Counters()
        self.loading = False
        verifier = Verifier(threads, is_digest_of, self.counters)
        disk, store = GatedDisk(threads, verifier), make_store_tier(MemoryStore())
        self.writes, self.gate = disk.writes, disk.gate
        below = Fetcher((store,), verifier, self.counters)
        self.admissions = NvmeAdmission(arena, disk, below, store, self.counters, lambda: self.loading)

    async def reserve(self, *names: str, length: int = HUGE) -> Reservation:
        """Reserve places for these chunks, and wait for their memory."""
        reservation = self.arena.reserve(TENANT, [(name, length) for name in names], 0.0)
        for place in reservation.places.values():
            await self.arena.view(place)
        return reservation

    async def load(self, *names: str, length: int = PAGE_BYTES) -> None:
        """Load these chunks and offer them for admission, as the loader does, then unpin the version."""
        reservation = await self.reserve(*names, length=length)
        for name in reservation.to_load:
            self.arena.index.mark_ready(TENANT, name)
            self.admissions.offer(TENANT, name, reservation.places[name])
        self.arena.unpin(reservation.slabs)

    async def begun(self, count: int) -> None:
        await eventually(lambda: len(self.writes) >= count)


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    with ThreadPoolExecutor(1) as threads:
        arena = Arena(HostIndex(HUGE, SLABS), SlabPool(HUGE, SLABS, threads))
        world = World(arena, threads)
        try:
            yield world
        finally:
            await world.admissions.close()
            await arena.close()


async def test_offered_chunks_are_written_in_order() -> None:
    """At most two chunks are written at once, and their slabs are free afterwards."""

    async with open_world() as world:
        await world.load("a", "b", "c")
        await world.begun(2)
        assert world.writes == ["a", "b"]
        assert (world.admissions.waiting_count, world.arena.index.busy_count) == (3, 1)
        world.gate.set()
        await world.admissions.wait_until_idle()
        assert world.writes == ["a", "b", "c"]
        assert world.admissions.waiting_count == 0
        assert world.arena.index.busy_count == 0
        assert world.counters.admitted_chunks == 3


async def test_one_chunk_is_written_during_loads() -> None:
    async with open_world() as world:
        world.loading = True
        await world.load("a", "b")
        await world.begun(1)
        await asyncio.sleep(0)
        assert world.writes == ["a"]
        world.gate.set()
        await world.admissions.wait_until_idle()
        assert world.writes == ["a", "b"]


async def test_waiting_chunks_give_up_needed_memory() -> None:
    """A version that needs slabs drops as many of the waiting chunks as it needs, the longest waiting first."""

    async with open_world() as world:
        world.loading = True
        for name in ("a", "b", "c", "d"):
            await world.load(name, length=HUGE)
        await world.begun(1)
        world.arena.on_full = lambda: False
        with pytest.raises(Refused) as refused:
            await world.reserve("x", "y")
        assert isinstance(refused.value.failure, Overloaded), "the control: without `drop_oldest` there is no room"
        world.arena.on_full = world.admissions.drop_oldest
        reservation = await world.reserve("x", "y")
        assert (world.counters.unkept_chunks, world.admissions.waiting_count) == (2, 2)
        with pytest.raises(Refused):  # chunks that are being written stay
            await world.reserve("v", "w")
        for name in reservation.to_load:
            world.arena.index.drop(TENANT, name)
        world.arena.unpin(reservation.slabs)
        world.gate.set()
        await world.admissions.wait_until_idle()
        assert world.writes == ["a"]
        assert world.counters.unkept_chunks == 3
        assert world.arena.index.busy_count == 0


async def test_chunk_found_wrong_in_memory_is_not_written() -> None:
    """A chunk that waits to be written is dropped when a check finds its memory wrong."""

    async with open_world() as world:
        await world.load("a", "b", "c")
        await world.begun(2)
        world.arena.index.drop_damaged(TENANT, "c")
        world.gate.set()
        await world.admissions.wait_until_idle()
        assert world.writes == ["a", "b"]
        assert world.arena.index.busy_count == 0


async def test_closing_cancels_all_writes() -> None:
    """Running writes are cancelled, and waiting chunks are dropped."""

    async with open_world() as world:
        await world.load("a", "b", "c")
        await world.begun(2)
        await world.admissions.close()
        assert world.arena.index.busy_count == 0
        assert world.writes == ["a", "b"]


ONE = make_version(seed=1, pages=(4,), files=())
(CHUNK,) = ONE.manifest.chunks


async def prefetch_chunk(cache: Cache) -> str | None:
    """Admit the chunk as a prefetch does."""
    return await cache.admissions.ensure_written(TENANT, CHUNK.digest, CHUNK.length)


async def rewrite_chunk(cache: Cache) -> None:
    await cache.admissions.rewrite(TENANT, CHUNK.digest)


@pytest.mark.parametrize("write", [prefetch_chunk, rewrite_chunk])
async def test_eviction_waits_for_a_chunk_being_admitted(
    tmp_path: Path, write: Callable[[Cache], Coroutine[None, None, object]]
) -> None:
    """A chunk that is being admitted when NVMe is evicted does not stay there."""
    store = CountingStore(FileStore(tmp_path / "store"))
    await publish(store, ONE)
    async with open_test_cache(settings_of(tmp_path), store=store) as cache:
        store.gate.clear()
        writing = asyncio.create_task(write(cache))
        await eventually(lambda: store.ranges)
        evicting = asyncio.create_task(cache.evict("nvme", None, None))
        await run_tasks()  # the eviction reads the index
        store.gate.set()
        await asyncio.gather(writing, evicting)
        assert cache.counters.admitted_chunks == 1
        assert cache.nvme.index.file_count == 0


class HeldIndexes(MemoryStore):
    """A store whose indexes can't be read before `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if "/index/" in key:
            self.asked.set()
            await self.go.wait()
        return await super().read(key, offset, length)


async def test_eviction_waits_for_a_chunk_being_located(tmp_path: Path) -> None:
    """Healing still has to read the chunk's length from the store when NVMe is evicted."""
    store = HeldIndexes()
    await publish(store, ONE)
    async with open_test_cache(settings_of(tmp_path), store=store) as cache:
        rewriting = asyncio.create_task(rewrite_chunk(cache))
        await store.asked.wait()
        evicting = asyncio.create_task(cache.evict("nvme", None, None))
        await run_tasks()
        store.go.set()
        await asyncio.gather(rewriting, evicting)
        assert cache.counters.admitted_chunks == 1
        assert cache.nvme.index.file_count == 0


async def test_load_does_not_wait_for_a_chunk_being_located(tmp_path: Path) -> None:
    """While healing reads the chunk's length from the store, a load may read the chunk from other nodes."""
    store = HeldIndexes()
    await publish(store, ONE)
    async with open_test_cache(settings_of(tmp_path), store=store) as cache:
        rewriting = asyncio.create_task(rewrite_chunk(cache))
        await store.asked.wait()
        assert not cache.nvme.may_have(TENANT, CHUNK.digest)
        store.go.set()
        await rewriting
        assert cache.nvme.index.is_readable((TENANT, CHUNK.digest))


async def test_missing_chunk_is_logged_and_not_healed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the chunk."""
    async with open_test_cache(settings_of(tmp_path)) as cache:
        await rewrite_chunk(cache)
    (line,) = [vars(record) for record in caplog.records if record.message == "a kept chunk was not healed"]
    assert line["why"] == ChunkMissing(CHUNK.digest).message


async def test_chunk_of_a_failed_load_is_still_admitted(tmp_path: Path) -> None:
    """A prefetch to NVMe wants a chunk that is being loaded. The load is refused, and the chunk is admitted."""
    store, lies = CountingStore(FileStore(tmp_path / "store")), [False, False]  # for both reads of the store's copy

    def verify(data: memoryview, digest: str) -> bool:
        return lies.pop() if lies else is_digest_of(data, digest)

    await publish(store, ONE)
    async with open_test_cache(settings_of(tmp_path), store=store, verify=verify) as cache:
        store.gate.clear()
        loading = asyncio.create_task(cache.version_loader.load(TENANT, ONE.id, TIMEOUT_S, urgent=True))
        await eventually(lambda: store.ranges)
        ensuring = asyncio.create_task(prefetch_chunk(cache))
        await asyncio.sleep(0)
        store.gate.set()
        with pytest.raises(Refused):
            await loading
        assert await ensuring == "store"
        assert cache.nvme.index.is_readable((TENANT, CHUNK.digest))


async def test_chunk_is_admitted_after_another_writer_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefetch wants a chunk that is being written. The disk refuses that write, and takes the prefetch's."""
    write, held, go = ChunkFiles.write, threading.Event(), threading.Event()

    def refuse_first(files: ChunkFiles, path: Path, data: bytes | memoryview, *, direct: bool) -> None:
        if direct and not held.is_set():
            held.set()
            assert go.wait(TIMEOUT_S)
            raise OSError(errno.ENOSPC, "no space")
        write(files, path, data, direct=direct)

    monkeypatch.setattr(ChunkFiles, "write", refuse_first)
    store = FileStore(tmp_path / "store")
    await publish(store, ONE)
    async with open_test_cache(settings_of(tmp_path), store=store) as cache:
        await cache.version_loader.load(TENANT, ONE.id, TIMEOUT_S, urgent=True)
        await asyncio.to_thread(held.wait, TIMEOUT_S)
        ensuring = asyncio.create_task(prefetch_chunk(cache))
        await asyncio.sleep(0)
        go.set()
        assert await ensuring == "host"
        assert cache.nvme.index.is_readable((TENANT, CHUNK.digest))
        await cache.loader.wait_until_idle()
        assert (cache.counters.admitted_chunks, cache.counters.unadmitted_chunks) == (1, 1)


async def test_prefetch_to_nvme_respects_store_reads(tmp_path: Path) -> None:
    """Reads for memory and for NVMe together stay within `KELVIN_STORE_READS`."""
    store = CountingStore(FileStore(tmp_path / "store"))
    other = make_version(seed=2, pages=(4,), files=())
    for version in (ONE, other):
        await publish(store, version)
    async with open_test_cache(replace(settings_of(tmp_path), store_reads=1), store=store) as cache:
        store.gate.clear()
        loading = asyncio.create_task(cache.version_loader.load(TENANT, other.id, TIMEOUT_S, urgent=True))
        await eventually(lambda: store.ranges)
        ensuring = asyncio.create_task(prefetch_chunk(cache))
        await eventually(lambda: cache.fetcher.scheduler.queued["store"] or len(store.ranges) > 1)
        assert (len(store.ranges), cache.fetcher.scheduler.running["store"]) == (1, 1)
        store.gate.set()
        await loading
        assert await ensuring == "store"
