"""World: the weight cache of one machine, between a store and processes that lease versions.

Everything below `open_cache` is the product's: residents, loader, fetcher, indexes, files, examination, repair and
prefetch. Slabs are ordinary memory. Faults: chunks are damaged, disks fill up, the store is slow or returns wrong
bytes, threads are late, leases are cancelled at any point, and the cache restarts with its disk.
"""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, cast
from unittest import mock

from kelvin.blobstore.blob_store import BlobStat, BlobUnavailable
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused
from tests.simulation.core.world import InjectedError, World, operation
from tests.weightcache.kit import Version, make_version_of, publish, settings_of
from weightcache.app.cache import Cache, open_cache
from weightcache.app.settings import CacheSettings
from weightcache.host.slab_pool import Slab, SlabPool
from weightcache.nvme.chunk_files import ChunkFiles

TENANTS: Final = ("ann", "bob")
VERSIONS: Final = 4
CHUNKS: Final = 14  # of which all versions are made
SLAB_PAGES: Final = 4
CALM_S: Final = 120
SLACK_S: Final = 1.0
# A lease may be refused with these codes during a fault, or while the tiers are full.
EXCUSED: Final = frozenset({
    "overloaded", "unavailable", "capacity_exceeded", "chunk_corrupt", "chunk_missing", "deadline_exceeded",
    "manifest_corrupt", "pack_corrupt", "not_found",
})  # fmt: skip


class PlainSlab:
    """A slab in ordinary memory instead of sealed shared memory."""

    huge = False
    fd = -1

    def __init__(self, length: int) -> None:
        self.length = length
        self.tenant: str | None = None
        self._bytes = bytearray(length)

    def view(self, offset: int, length: int) -> memoryview:
        assert 0 <= offset <= offset + length <= self.length
        return memoryview(self._bytes)[offset : offset + length]

    def zero(self) -> None:
        self._bytes[:] = bytes(self.length)
        self.tenant = None

    def close(self) -> None:
        """Nothing to close: no memory is mapped."""


class SlowStore:
    """A store that takes time, and sometimes fails or returns wrong bytes."""

    def __init__(self, random: Random) -> None:
        self.inner = MemoryStore()
        self.random = random
        self.slowest_s = 0.02
        self.fails = self.lies = 0.0
        self.is_stalled = False

    async def put_if_absent(self, key: str, data: bytes | AsyncIterator[bytes]) -> bool:
        return await self.inner.put_if_absent(key, data)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        await self._wait()
        return await self.inner.read(key, offset, length)

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        await self._wait()
        await self.inner.read_into(key, offset, into)
        if self.random.random() < self.lies:
            into[0] ^= 1

    async def stat(self, key: str) -> BlobStat:
        await self._wait()
        return await self.inner.stat(key)

    def list(self, prefix: str) -> AsyncIterator[str]:
        return self.inner.list(prefix)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    async def _wait(self) -> None:
        await asyncio.sleep(self.random.uniform(0.0005, self.slowest_s))
        while self.is_stalled:
            await asyncio.sleep(0.1)
        if self.random.random() < self.fails:
            raise BlobUnavailable("the simulation says so")


class CacheWorld(World):
    """Two tenants have the same versions, which share chunks. The cache has room for some of them."""

    name = "cache"
    steps_max = 30

    async def start(self) -> None:
        """Create a fresh cache, and a store with all versions."""
        random = self.random
        self.store = SlowStore(Random(random.random()))
        self.delays = Random(random.random())
        self.slowest_s = random.choice((0.001, 0.05))
        self.loop.executor_delay_s = self._delay_s
        chunks = [random.randbytes(PAGE_BYTES * random.choice((1, 1, 2))) for _ in range(CHUNKS)]
        self.versions: list[Version] = []
        for _ in range(VERSIONS):
            chosen = random.sample(chunks, random.randint(1, CHUNKS - 4))
            self.versions.append(make_version_of(chosen, 2 * PAGE_BYTES))
        for tenant in TENANTS:
            for version in self.versions:
                await publish(self.store, version, tenant)
        largest = max(len(version.linear) for version in self.versions)
        slabs = random.choice((6, 8, 16, 40))
        self.settings: CacheSettings = replace(
            settings_of(self.directory, slabs=slabs, slab_bytes=SLAB_PAGES * PAGE_BYTES),
            nvme_bytes=random.choice((largest // 2, 2 * largest, 1 << 24)),
            scrub_s=random.choice((0.0, 20.0)),
        )
        self.most_slabs = random.choice((3, 64, 64))
        self.leases: set[asyncio.Task[None]] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.wrong_in_memory: set[tuple[str, str]] = set()
        self.disk_is_full = False
        self.late: list[str] = []
        self.bad: list[str] = []
        self.contradictions: list[str] = []
        self.patches, make = AsyncExitStack(), cast(Callable[[int], Slab], PlainSlab)
        self.patches.enter_context(mock.patch("weightcache.app.cache.SlabPool", partial(SlabPool, make=make)))
        self.patches.enter_context(mock.patch("weightcache.fetch.version_loader.MAX_SLABS", self.most_slabs))
        write = ChunkFiles.write

        def written(files: ChunkFiles, path: Path, data: bytes | memoryview, *, direct: bool) -> None:
            if self.disk_is_full:
                raise InjectedError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(files, path, data, direct=direct)

        self.patches.enter_context(mock.patch.object(ChunkFiles, "write", written))
        await self._open()

    def _delay_s(self) -> tuple[float, float]:
        return self.delays.uniform(0.0, self.slowest_s), self.delays.uniform(0.0, self.slowest_s)

    async def _open(self) -> None:
        self.stack = AsyncExitStack()
        self.cache: Cache = await self.stack.enter_async_context(open_cache(self.settings, self.store))

    # Leases.

    async def _lease(self, tenant: str, version: Version, timeout_s: float, hold_s: float) -> None:
        """Lease the version, check all its bytes, and hold it."""
        begun_s = self.loop.time()
        try:
            async with self.cache.version_loader.pin_version(tenant, version.id, timeout_s) as arrival:
                self._judge(tenant, version, begun_s, timeout_s)
                data = _bytes_of(self.cache, arrival.resident)
                wrong = [
                    digest
                    for digest, got, right in _chunks_of(version, data)
                    if got != right and (tenant, digest) not in self.wrong_in_memory
                ]
                if wrong:
                    self.bad.append(f"a lease of {version.id[:8]} has {len(wrong)} wrong chunks")
                await asyncio.sleep(hold_s)
        except Refused as refused:
            self._judge(tenant, version, begun_s, timeout_s)
            self.record_event(f"a lease is refused: {refused.failure.code}")
            if refused.failure.code not in EXCUSED:
                self.bad.append(f"a lease of {version.id[:8]} is refused: {refused.failure.code}")

    def _judge(self, tenant: str, version: Version, begun_s: float, timeout_s: float) -> None:
        took_s = self.loop.time() - begun_s
        if took_s > timeout_s + SLACK_S:
            self.late.append(f"a lease of {version.id[:8]} took {took_s:.1f} of {timeout_s:g} s")

    def _begin(self, work: Any, owner: "set[asyncio.Task[None]]") -> None:
        task = self.loop.create_task(work)
        owner.add(task)
        task.add_done_callback(owner.discard)

    @operation(10)
    async def lease(self, random: Random) -> None:
        """Start some leases of one or several versions."""
        for _ in range(random.choice((1, 1, 2, 5))):
            tenant, version = random.choice(TENANTS), random.choice(self.versions)
            timeout_s, hold_s = random.choice((0.05, 5.0, 30.0)), random.choice((0.0, 0.1, 3.0, 40.0))
            self._begin(self._lease(tenant, version, timeout_s, hold_s), self.leases)
            if random.random() < 0.5:
                await asyncio.sleep(random.uniform(0.0, 0.05))

    @operation(5)
    async def cancel(self, random: Random) -> None:
        """Cancel some waiting or held leases."""
        leases = sorted(self.leases, key=lambda task: task.get_name())
        for task in random.sample(leases, min(len(leases), random.randint(1, 3))):
            task.cancel()

    @operation(3)
    async def prefetch(self, random: Random) -> None:
        """Prefetch a version that has no lease."""
        tenant, version, is_urgent = random.choice(TENANTS), random.choice(self.versions), random.random() < 0.5

        async def bring() -> None:
            try:
                await self.cache.version_loader.load(tenant, version.id, 20.0, urgent=is_urgent)
            except Refused as refused:
                self.record_event(f"a prefetch is refused: {refused.failure.code}")

        self._begin(bring(), self.tasks)

    @operation(4)
    async def evict(self, random: Random) -> None:
        """Evict a tier's content: of one version, of one tenant, or all."""
        tier: Any = random.choice(("host", "nvme"))
        tenant = random.choice((None, *TENANTS))
        version = random.choice((None, *self.versions)) if tenant is not None else None

        async def drop() -> None:
            try:
                await self.cache.evict(tier, tenant, None if version is None else version.id)
            except Refused as refused:
                self.record_event(f"an eviction is refused: {refused.failure.code}")

        self._begin(drop(), self.tasks)

    # Damage, and its detection.

    @operation(5)
    async def damage_memory(self, random: Random) -> None:
        """Flip a bit of a chunk in memory."""
        index = self.cache.arena.index
        ready = sorted(key for key, _ in index.ready_chunks())
        if ready:
            tenant, digest = random.choice(ready)
            place = index.try_place(tenant, digest)
            if place is not None:
                self.wrong_in_memory.add((tenant, digest))
                (await self.cache.arena.view(place))[0] ^= 1

    @operation(3)
    async def damage_file(self, random: Random) -> None:
        """Change, cut, empty or delete a file of the cache."""
        files = sorted(path for path in self.settings.cache.rglob("*") if path.is_file() and len(path.name) == 64)
        if not files:
            return
        path = random.choice(files)
        content = bytearray(path.read_bytes())
        match random.randrange(4):
            case 0 if content:
                content[0] ^= 1
                path.write_bytes(content)
            case 1:
                os.truncate(path, len(content) // 2)
            case 2:
                os.truncate(path, 0)
            case _:
                path.unlink()

    @operation(5)
    async def examine(self, random: Random) -> None:
        """Examine some chunks, each several times at once."""
        kept = sorted(self.cache.examiner.stored_chunks())
        wrong = [(tier, key, size) for tier, key, size in kept if tier == "host" and key in self.wrong_in_memory]
        for tier, key, _ in random.sample(wrong or kept, min(len(wrong or kept), 2)):
            for _ in range(random.randint(1, 3)):
                self._begin(self._look(tier, *key), self.tasks)

    async def _look(self, tier: str, tenant: str, digest: str) -> None:
        try:
            await self.cache.examiner.examine(tier, tenant, digest)
        except Refused as refused:
            self.record_event(f"an examination is refused: {refused.failure.code}")

    @operation(2)
    async def check_all(self, random: Random) -> None:
        """Check the whole cache, as an operator does."""
        self._begin(self._check_all(), self.tasks)

    async def _check_all(self) -> None:
        try:
            report = await self.cache.examiner.examine_all()
        except Refused as refused:
            self.record_event(f"a check is refused: {refused.failure.code}")
        else:
            self.contradictions += [each for each in report.contradictions if each.startswith("the index")]

    # Faults.

    def _for_a_while(self, random: Random, what: object, name: str, value: object, then: object) -> None:
        setattr(what, name, value)
        self.loop.call_later(random.uniform(0.05, 20.0), setattr, what, name, then)

    @operation(2)
    async def fill_disk(self, random: Random) -> None:
        """Let every write fail for a while."""
        self._for_a_while(random, self, "disk_is_full", True, False)

    @operation(3)
    async def break_store(self, random: Random) -> None:
        """Let the store fail, return wrong bytes, stall or be slow for a while."""
        match random.randrange(4):
            case 0:
                self._for_a_while(random, self.store, "fails", 0.5, 0.0)
            case 1:
                self._for_a_while(random, self.store, "lies", 0.5, 0.0)
            case 2:
                self._for_a_while(random, self.store, "is_stalled", True, False)
            case _:
                self._for_a_while(random, self.store, "slowest_s", 1.0, 0.02)

    @operation(2)
    async def restart(self, random: Random) -> None:
        """Restart the cache. Its memory is lost, its disk stays."""
        await self._end()
        await self._open()

    async def _end(self) -> None:
        for task in (*self.leases, *self.tasks):
            task.cancel()
        await asyncio.gather(*self.leases, *self.tasks, return_exceptions=True)
        await self.stack.aclose()
        self.wrong_in_memory.clear()

    # Rest.

    async def quiesce(self) -> None:
        """End all faults and leases, then lease each version once more."""
        self.disk_is_full, self.store.fails, self.store.lies = False, 0.0, 0.0
        self.store.is_stalled, self.store.slowest_s = False, 0.02
        await asyncio.sleep(25.0)
        for task in (*self.leases, *self.tasks):
            task.cancel()
        await asyncio.gather(*self.leases, *self.tasks, return_exceptions=True)
        async with asyncio.timeout(CALM_S):
            await self.cache.loader.wait_until_idle()
        await self._check_all()
        await self.cache.loader.wait_until_idle()
        self.at_rest_busy = await self._busy()
        self.not_leased: list[str] = []
        for tenant in TENANTS:
            for version in self.versions:
                await self._lease_at_rest(tenant, version)
        await self.cache.loader.wait_until_idle()
        self.at_rest_busy = max(self.at_rest_busy, await self._busy())

    async def _busy(self) -> int:
        """Return the number of slabs in use. A slab that is being scrubbed becomes free a moment later."""
        index = self.cache.arena.index
        for _ in range(50):
            if not index.busy_count:
                return 0
            await asyncio.sleep(0.1)
        return index.busy_count

    async def _lease_at_rest(self, tenant: str, version: Version) -> None:
        try:
            async with self.cache.version_loader.pin_version(tenant, version.id, 60.0) as arrival:
                if _bytes_of(self.cache, arrival.resident) != version.linear:
                    self.bad.append(f"{version.id[:8]} has wrong bytes at rest")
        except Refused as refused:
            if refused.failure.code != "capacity_exceeded":
                self.not_leased.append(f"{version.id[:8]}: {refused.failure.code}")

    async def stop(self) -> None:
        """End the cache like an agent."""
        await self._end()
        await self.patches.aclose()


def _bytes_of(cache: Cache, resident: Any) -> bytes:
    """Return the version's bytes as a lease would map them now."""
    layout = json.loads(os.pread(resident.documents.fd, 1 << 20, resident.manifest_bytes))
    slabs = [cache.arena.slab(number) for number in resident.slabs]
    return b"".join(bytes(slabs[slab].view(offset, length)) for _, slab, offset, length in layout["extents"])


def _chunks_of(version: Version, data: bytes) -> list[tuple[str, bytes, bytes]]:
    found, at = [], 0
    for digest, chunk in zip(version.digests, version.chunks, strict=True):
        found.append((digest, data[at : at + len(chunk)], chunk))
        at += len(chunk)
    return found


# Invariants.


def the_indexes_are_sound(world: CacheWorld) -> None:
    world.cache.arena.index.check_integrity()
    world.cache.nvme.index.check_integrity()


def leases_end_within_their_time(world: CacheWorld) -> None:
    assert not world.late, world.late[0]


def leases_have_what_was_asked_for(world: CacheWorld) -> None:
    """Each byte is right, unless a flipped bit was not examined yet. Each refusal has an expected code."""
    assert not world.bad, world.bad[0]


def checks_find_no_contradiction(world: CacheWorld) -> None:
    assert not world.contradictions, world.contradictions[0]


def nothing_is_pinned_at_rest(world: CacheWorld) -> None:
    """Without leases and waiters, no slab is in use."""
    assert not world.at_rest_busy, f"{world.at_rest_busy} slabs are in use at rest"


def every_version_can_be_leased_at_rest(world: CacheWorld) -> None:
    assert not world.not_leased, world.not_leased[0]


CacheWorld.always = (
    the_indexes_are_sound, leases_end_within_their_time, leases_have_what_was_asked_for, checks_find_no_contradiction,
)  # fmt: skip
CacheWorld.at_rest = (nothing_is_pinned_at_rest, every_version_can_be_leased_at_rest)
