"""Many versions are missed at once: bandwidth is shared by weight, and each range is read once, however many wait."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kelvin.blobstore.memory_store import MemoryStore
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from tests.eventually import eventually
from tests.weightcache.kit import TENANT, Version, make_version_of, open_test_cache, publish, settings_of
from weightcache.app.cache import Cache
from weightcache.fetch import read_scheduler
from weightcache.sources.policy import fair_read_queue
from weightcache.sources.policy.fair_read_queue import ChunkKey, FairReadQueue, WaiterIndex

AT_ONCE = 8
LIMIT_S = 60.0


class Line(MemoryStore):
    """A store that serves one range after another, in order of requests. Its clock is the number of bytes served."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.moved = 0
        self.ranges: list[tuple[str, int]] = []
        self.last: dict[str, int] = {}  # the clock after the last range of each key

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        await self.open.wait()
        await super().read_into(key, offset, into)
        self.moved += into.nbytes
        self.ranges.append((key, offset))
        self.last[key] = self.moved


class FirstCome(FairReadQueue):
    """The control: the first flow gets all bandwidth until it is done."""

    def __init__(self, wants: WaiterIndex) -> None:
        super().__init__(wants)
        self._fifo: dict[ChunkKey, int] = {}

    def add(self, key: ChunkKey, nbytes: int) -> None:
        super().add(key, nbytes)
        self._fifo[key] = nbytes

    def peek(self) -> tuple[ChunkKey, int] | None:
        return next(iter(self._fifo.items()), None)

    def start_next(self, nbytes: int | None = None) -> ChunkKey:
        key = next(iter(self._fifo))
        del self._fifo[key]
        self.remove(key)
        return key

    def end_part(self, key: ChunkKey) -> None:
        """Do nothing: this queue keeps no account."""


class Forgetful(FairReadQueue):
    """Another control: a read counts as ended when it begins."""

    def start_next(self, nbytes: int | None = None) -> ChunkKey:
        key = super().start_next(nbytes)
        super().end_part(key)
        return key

    def end_part(self, key: ChunkKey) -> None:
        """Do nothing: `start_next` ended it already."""


def make_random_version(seed: int, chunks: int) -> Version:
    source = random.Random(seed)
    return make_version_of([source.randbytes(PAGE_BYTES) for _ in range(chunks)], PAGE_BYTES)


def cache_over(root: Path, store: MemoryStore) -> AbstractAsyncContextManager[Cache]:
    """Return a cache without NVMe."""
    return open_test_cache(replace(settings_of(root, slabs=24, nvme_bytes=0), store_reads=AT_ONCE), store=store)


def store_chunks(cache: Cache) -> int:
    """Return how many chunks wait for the store or are being read from it."""
    scheduler = cache.fetcher.scheduler
    return scheduler.queued["store"] + scheduler.running["store"]


async def storm(root: Path, sizes: Sequence[int]) -> list[float]:
    """Miss versions of these many chunks at once. Return when each was complete, as a fraction of its fair time: the
    time if every byte were shared among all unfinished versions.
    """
    store = Line()
    versions = [make_random_version(seed, chunks) for seed, chunks in enumerate(sizes)]
    packs = [await publish(store, version) for version in versions]
    async with cache_over(root, store) as cache, AsyncExitStack() as leases:
        pins = [cache.version_loader.pin_version(TENANT, version.id, LIMIT_S) for version in versions]
        waiting = [asyncio.create_task(leases.enter_async_context(pin)) for pin in pins]
        await eventually(lambda: store_chunks(cache) == sum(sizes))
        store.open.set()
        await asyncio.gather(*waiting)
    fair = [PAGE_BYTES * sum(min(mine, other) for other in sizes) for mine in sizes]
    return [store.last[f"{TENANT}/packs/{pack}"] / due for pack, due in zip(packs, fair, strict=True)]


SIZES = tuple(random.Random(30).choices(range(60, 121), k=30))


SMALL = (3 * AT_ONCE,) * 30  # the first version could begin a third of its chunks before the others came


@pytest.mark.parametrize("sizes", [SIZES, SMALL], ids=["many chunks", "few chunks"])
async def test_thirty_versions_share_the_line(tmp_path: Path, sizes: Sequence[int]) -> None:
    """Thirty versions that are missed at once finish within 20 % of their fair time."""
    ended = await storm(tmp_path, sizes)
    assert all(0.8 <= each <= 1.2 for each in ended), ended


async def test_control_ignoring_running_reads_is_unfair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without counting running reads, and without credit, the first version keeps what it began before others came."""
    monkeypatch.setattr(read_scheduler, "FairReadQueue", Forgetful)
    monkeypatch.setattr(fair_read_queue, "MAX_CREDIT_BYTES", 0)
    assert min(await storm(tmp_path, SMALL)) < 0.8


async def test_control_first_come_is_unfair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of requests, the first versions finish far before their fair time."""
    monkeypatch.setattr(read_scheduler, "FairReadQueue", FirstCome)
    ended = await storm(tmp_path, SIZES[:10])
    assert min(ended) < 0.3
    assert not all(0.8 <= each <= 1.2 for each in ended)


async def wait_a_thousand_times(cache: Cache, store: Line, version: Version) -> None:
    """Let a thousand leases wait through the cache before the first byte is served."""

    async def wait() -> None:
        async with cache.version_loader.pin_version(TENANT, version.id, LIMIT_S):
            pass

    waiting = [asyncio.create_task(wait()) for _ in range(1000)]
    await eventually(lambda: store_chunks(cache) == len(version.digests))
    store.open.set()
    await asyncio.gather(*waiting)


async def read_twenty_times(cache: Cache, store: Line, version: Version) -> None:
    """Read the version twenty times, without single-flight."""
    store.open.set()
    for _ in range(20):
        for digest in version.digests:
            await cache.store_tier.fetch(TENANT, digest, memoryview(bytearray(PAGE_BYTES)))


async def count_reads(
    root: Path, scenario: Callable[[Cache, Line, Version], Awaitable[None]]
) -> tuple[list[tuple[str, int]], int]:
    """Return the ranges that were read from the store, and how many chunks the version has."""
    store = Line()
    version = make_random_version(1, 50)
    await publish(store, version)
    async with cache_over(root, store) as cache:
        await scenario(cache, store, version)
    return store.ranges, len(version.digests)


async def test_thousand_waiters_read_each_range_once(tmp_path: Path) -> None:
    ranges, count = await count_reads(tmp_path, wait_a_thousand_times)
    assert len(ranges) == len(set(ranges)) == count


async def test_control_without_single_flight(tmp_path: Path) -> None:
    """Negative control: without single-flight, each range is read twenty times."""
    ranges, count = await count_reads(tmp_path, read_twenty_times)
    assert len(set(ranges)) == count
    assert len(ranges) == 20 * count


async def start_beside_a_prefetch(root: Path, *, leased: bool) -> float:
    """Start one version while another of the same size is prefetched, and leased as well if `leased`. Return which part
    of all bytes had been served when the start had its own.
    """
    store = Line()
    early, start = make_random_version(1, 100), make_random_version(2, 100)
    packs = [await publish(store, version) for version in (early, start)]
    async with cache_over(root, store) as cache, AsyncExitStack() as leases:
        waiting = [asyncio.create_task(cache.version_loader.load(TENANT, early.id, LIMIT_S, urgent=False))]
        await eventually(lambda: store_chunks(cache) == 100)
        if leased:
            lease = cache.version_loader.pin_version(TENANT, early.id, LIMIT_S)
            waiting.append(asyncio.create_task(_enter(leases, lease)))
        waiting.append(asyncio.create_task(cache.version_loader.load(TENANT, start.id, LIMIT_S, urgent=True)))
        await eventually(lambda: store_chunks(cache) == 200)
        store.open.set()
        await asyncio.gather(*waiting)
    return store.last[f"{TENANT}/packs/{packs[1]}"] / store.moved


async def _enter(leases: AsyncExitStack, lease: AbstractAsyncContextManager[object]) -> None:
    await leases.enter_async_context(lease)


async def test_prefetch_has_a_small_share_until_leased(tmp_path: Path) -> None:
    """A prefetch has a small share beside a start. From the moment a lease waits for it, it has an equal one."""
    assert await start_beside_a_prefetch(tmp_path / "alone", leased=False) < 0.7
    assert await start_beside_a_prefetch(tmp_path / "wanted", leased=True) > 0.9
