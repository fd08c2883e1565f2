"""Inject thousands of corruptions into the product's cache, whose tiers are damaged on purpose.

Each injection damages one chunk in one way in one place, asks for the chunk, and returns what was served. Files are
really damaged. Disk errors and short reads, the store, and memory are damaged where they are read.
"""

import asyncio
import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import pytest
from blake3 import blake3

from kelvin.blobstore.blob_store import BlobShort, BlobUnavailable
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.blobstore.retrying_store import RetryBudget, RetryingStore
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused
from tests.weightcache.kit import HUGE, TENANT, put_pack, settings_of
from weightcache.app.cache import Cache, open_cache
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.source import Verify

READS_AT_ONCE: Final = RetryBudget(attempts=2, base_s=0.0)
FOR_GOOD: Final = 1 << 30


_preadv = os.preadv


class Kind(StrEnum):
    """How a chunk is damaged."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    SWAP = "swap"
    STALE = "stale"
    ZERO = "zero"
    SHORT = "short"
    EIO = "eio"


CONTENT: Final = (Kind.FLIP, Kind.SWAP, Kind.STALE, Kind.ZERO)
FOUND_AS: Final = dict.fromkeys(CONTENT, ReadOutcome.DIGEST) | {
    Kind.TRUNCATE: ReadOutcome.LENGTH,
    Kind.SHORT: ReadOutcome.SHORT,
    Kind.EIO: ReadOutcome.UNREADABLE,
}


class Where(StrEnum):
    """Where a chunk is damaged. *Once* is a bad read; anything else is a bad object."""

    NVME = "nvme"
    STORE = "store"
    STORE_ONCE = "store, once"
    BOTH = "nvme and store"
    BOTH_ONCE = "nvme and store, once"
    HOST = "host, before the check, for good"
    HOST_ONCE = "host, before the check, once"

    @property
    def on_nvme(self) -> bool:
        return self in (Where.NVME, Where.BOTH, Where.BOTH_ONCE)

    @property
    def store_reads(self) -> int:
        """How many reads of the store are damaged."""
        return {Where.STORE: FOR_GOOD, Where.BOTH: FOR_GOOD, Where.STORE_ONCE: 1, Where.BOTH_ONCE: 1}.get(self, 0)

    @property
    def checks(self) -> int:
        """Before how many checks the host's memory changes."""
        return {Where.HOST: FOR_GOOD, Where.HOST_ONCE: 1}.get(self, 0)


@dataclass(frozen=True, slots=True)
class Body:
    """A chunk, another chunk of the same length, and the chunk that an older version had in its place."""

    digest: str
    right: bytes
    swapped: bytes
    stale: bytes


@dataclass(frozen=True, slots=True)
class Injection:
    """One corruption. `want` is its right answer: None for the chunk's own bytes, else a failure's code."""

    body: Body
    kind: Kind
    where: Where
    seed: int

    @property
    def want(self) -> str | None:
        if self.where is Where.HOST:
            return "chunk_corrupt"
        if self.where not in (Where.STORE, Where.BOTH):
            return None
        return "unavailable" if self.kind is Kind.EIO else "chunk_corrupt"

    @property
    def faults(self) -> Counter[tuple[str, str]]:
        """The faults that the cache should count for it, by tier and kind."""
        found: Counter[tuple[str, str]] = Counter()
        if self.where.on_nvme:
            found["nvme", FOUND_AS[self.kind]] += 1
        if self.where.checks:
            found["nvme", ReadOutcome.DIGEST] += 1
            found["store", ReadOutcome.DIGEST] += min(2, self.where.checks - 1)
        # A store that returns errors is unavailable, which is retried below the cache and is no fault of a chunk.
        if self.where.store_reads and self.kind is not Kind.EIO:
            as_read = ReadOutcome.SHORT if self.kind is Kind.TRUNCATE else FOUND_AS[self.kind]
            found["store", as_read] += min(2, self.where.store_reads)
        return +found

    def apply(self, into: bytearray | memoryview) -> None:
        """Damage these bytes as the kind says, keeping their length."""
        if self.kind is Kind.FLIP:
            source = random.Random(self.seed)
            into[source.randrange(len(into))] ^= 1 << source.randrange(8)
        else:
            into[:] = {Kind.SWAP: self.body.swapped, Kind.STALE: self.body.stale}.get(self.kind, bytes(len(into)))


def kinds_of(where: Where) -> Sequence[Kind]:
    """Return the kinds of damage that are possible there. Memory has neither an end nor read errors."""
    return CONTENT if where.checks else tuple(Kind)


def make_bodies(count: int, seed: int) -> list[Body]:
    """Make distinct chunks of one to three pages. Each two neighbours are each other's `swapped`."""
    source, bodies = random.Random(seed), []
    for _ in range(count // 2):
        length = source.randint(1, 3) * PAGE_BYTES
        one, two = source.randbytes(length), source.randbytes(length)
        for right, other in ((one, two), (two, one)):
            bodies.append(Body(blake3(right).hexdigest(), right, other, source.randbytes(length)))
    return bodies


def draw(bodies: Sequence[Body], source: random.Random) -> list[Injection]:
    """Draw one injection for each chunk. A swap is done to both of a pair."""
    drawn: list[Injection] = []
    for at in range(0, len(bodies), 2):
        where = source.choice(list(Where))
        kind = source.choice(kinds_of(where))
        drawn.append(Injection(bodies[at], kind, where, source.getrandbits(32)))
        if kind is not Kind.SWAP:
            where = source.choice(list(Where))
            kind = source.choice([each for each in kinds_of(where) if each is not Kind.SWAP])
        drawn.append(Injection(bodies[at + 1], kind, where, source.getrandbits(32)))
    return drawn


class DamagedStore(MemoryStore):
    """A store that damages the next reads of chosen ranges."""

    def __init__(self) -> None:
        super().__init__()
        # by offset in the only pack; with the number of reads left
        self.sick: dict[int, tuple[Injection, list[int]]] = {}

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        injection, left = self.sick.get(offset, (None, [0]))
        if injection is None or left[0] == 0:
            await super().read_into(key, offset, into)
            return
        left[0] -= 1
        if injection.kind is Kind.EIO:
            raise BlobUnavailable("EIO")
        if injection.kind in (Kind.TRUNCATE, Kind.SHORT):
            half = injection.seed % into.nbytes
            into[:half] = injection.body.right[:half]
            raise BlobShort(key, offset, into.nbytes)
        await super().read_into(key, offset, into)
        injection.apply(into)


class Rig:
    """An open cache whose NVMe tier and store hold all of `bodies`."""

    def __init__(self, root: Path, bodies: Sequence[Body], verify: Verify) -> None:
        self.root = root
        self.bodies = bodies
        self.store = DamagedStore()
        self._verify = verify
        self._checks: dict[str, tuple[Injection, list[int]]] = {}
        self._disk: dict[int, Injection] = {}  # by inode
        self._lock = threading.Lock()
        self._offsets: dict[str, int] = {}
        self.cache: Cache

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Rig"]:
        await put_pack(self.store, [each.right for each in self.bodies])
        end = 0
        for each in self.bodies:
            self._offsets[each.digest], end = end, end + len(each.right)
        settings = settings_of(self.root, slabs=8, slab_bytes=HUGE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", self._preadv)
            async with open_cache(settings, RetryingStore(self.store, READS_AT_ONCE), verify=self._check) as cache:
                self.cache = cache
                assert await self._ask_all(self.bodies) == [None] * len(self.bodies)
                yield self

    async def inject(self, injections: Sequence[Injection]) -> list[tuple[Injection, str | None]]:
        """Inject, and return the injections with a wrong answer, with that answer. All chunks are healed on return."""
        absent = frozenset(each.body.digest for each in injections if each.where in (Where.STORE, Where.STORE_ONCE))
        await self.cache.nvme.evict(TENANT, None, absent)
        for each in injections:
            self._damage(each)
        answers = await self._ask_all([each.body for each in injections])
        self.store.sick.clear()
        self._checks.clear()
        self._disk.clear()
        refused = [each.body for each, answer in zip(injections, answers, strict=True) if answer not in (None, "wrong")]
        assert await self._ask_all(refused) == [None] * len(refused), "a chunk that was refused is not healed"
        return [(each, got) for each, got in zip(injections, answers, strict=True) if got != each.want]

    def path(self, digest: str) -> Path:
        return self.root / "cache" / TENANT / digest[:2] / digest

    def _damage(self, injection: Injection) -> None:
        digest = injection.body.digest
        if injection.where.on_nvme:
            self._damage_file(injection, self.path(digest))
        if reads := injection.where.store_reads:
            self.store.sick[self._offsets[digest]] = injection, [reads]
        if checks := injection.where.checks:
            self._checks[digest] = injection, [checks]

    def _damage_file(self, injection: Injection, path: Path) -> None:
        if injection.kind is Kind.TRUNCATE:
            os.truncate(path, injection.seed % len(injection.body.right))
        elif injection.kind in (Kind.SHORT, Kind.EIO):
            self._disk[path.stat().st_ino] = injection
        else:
            data = bytearray(injection.body.right)
            injection.apply(data)
            path.write_bytes(data)

    def _preadv(self, fd: int, parts: list[memoryview], offset: int) -> int:
        injection = self._disk.get(os.fstat(fd).st_ino) if self._disk else None
        if injection is None:
            return _preadv(fd, parts, offset)
        if injection.kind is Kind.EIO:
            raise OSError(errno.EIO, "injected")
        half = injection.seed % parts[0].nbytes // PAGE_BYTES * PAGE_BYTES
        return 0 if offset >= half else _preadv(fd, [parts[0][: half - offset]], offset)

    def _check(self, data: memoryview, digest: str) -> bool:
        with self._lock:
            injection, left = self._checks.get(digest, (None, [0]))
            if injection is not None and left[0]:
                left[0] -= 1
                injection.apply(data)
        return self._verify(data, digest)

    async def _ask_all(self, bodies: Sequence[Body]) -> list[str | None]:
        """Ask for all of them at once. Memory is empty before and after."""
        answers = await asyncio.gather(*(self._ask(body) for body in bodies))
        await self.cache.loader.wait_until_idle()
        assert self.cache.arena.evict(None, None) == 0, "a chunk stays pinned"
        return answers

    async def _ask(self, body: Body) -> str | None:
        """Return None if the chunk's own bytes are served, else "wrong" or the failure's code."""
        arena = self.cache.arena
        reservation = arena.reserve(TENANT, [(body.digest, len(body.right))], time.monotonic())
        try:
            await self.cache.loader.load(reservation)
            served = await arena.view(reservation.places[body.digest])
            return None if served == body.right else "wrong"
        except Refused as refused:
            return refused.failure.code
        finally:
            arena.unpin(reservation.slabs)
