"""Look again at what is kept: in memory or in a file, a chunk is hashed anew, and dropped where it is wrong.

The `Scrubber` looks at everything from time to time while nothing loads; `check` looks at once, where an operator asks.

A chunk of the host tier that changed after its first check is not leased again: its versions are no longer resident,
and their next load brings the chunk anew, into another place. Processes that have the old place mapped still see it,
so `damages` lists it while its slab exists. A faulty file is set aside, and its chunk written anew from a good copy.
"""

import asyncio
import logging
import mmap
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from contracts.errors import Refused
from service.loops import isolated
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.nvme import NvmeTier
from weightcache.policy.extents import Place
from weightcache.policy.healing import FAULTS, Outcome
from weightcache.verifying import Verifier

log = logging.getLogger(__name__)
BYTES_PER_S: Final = 64 << 20  # a hundredth of a core, and little beside what a disk gives
BUSY_S: Final = 0.2
MAX_TOLD: Final = 1000  # faults that a check names; all are counted


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk that is not what it was, and where in memory it lies."""

    tenant: str
    digest: str
    place: Place


@dataclass(frozen=True, slots=True)
class Fault:
    """A kept chunk that was wrong: where, whose, and how (`policy/healing.Outcome`)."""

    tier: str
    tenant: str
    chunk: str
    kind: str


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a check: chunks and bytes by tier, faults, and contradictions of the indexes."""

    chunks: dict[str, int]
    bytes: dict[str, int]
    faults: tuple[Fault, ...]
    contradictions: tuple[str, ...]


class Examiner:
    """Examines one chunk after another. `forget` is called with the slab of a chunk that was wrong in memory; `mend`
    writes a tenant's chunk to NVMe again.
    """

    def __init__(
        self,
        arena: Arena,
        nvme: NvmeTier,
        verifier: Verifier,
        counters: Counters,
        forget: Callable[[int], None],
        mend: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._arena = arena
        self._nvme = nvme
        self._verifier = verifier
        self._counters = counters
        self._forget = forget
        self._mend = mend
        self._wrong: dict[Damage, None] = {}

    def __repr__(self) -> str:
        return f"<Examiner damages={len(self._wrong)}>"

    def damages(self) -> tuple[Damage, ...]:
        """Return chunks that were wrong in a slab that still exists: processes may have them mapped."""
        self._wrong = {damage: None for damage in self._wrong if self._arena.index.has_slab(damage.place.slab)}
        return tuple(self._wrong)

    def kept(self) -> Iterable[tuple[str, tuple[str, str], int]]:
        """Yield (tier, (tenant, digest), length in bytes) of each chunk that is kept now."""
        yield from (("host", key, length) for key, length in self._arena.index.ready_chunks())
        yield from (("nvme", key, self._nvme.index.length(key)) for key in self._nvme.index.select(None, None))

    async def examine(self, tier: str, tenant: str, digest: str) -> Outcome:
        """Examine the tier's copy. A faulty one is dropped, logged and counted. Returns `ABSENT` if there is no copy
        any more.
        """
        outcome = await (self._in_memory if tier == "host" else self._in_file)(tenant, digest)
        self._counters.examined[tier] += outcome is not Outcome.ABSENT
        if outcome in FAULTS:
            seen = {"tenant": tenant, "chunk": digest, "tier": tier, "kind": outcome}
            log.error("a kept chunk is faulty", extra=seen)
        if tier == "nvme" and outcome in FAULTS:
            await self.examine("host", tenant, digest)  # what is kept anew is kept from what is right now
            await self._mend(tenant, digest)
        return outcome

    async def check(self) -> Report:
        """Examine all that is kept now, without a pause, and hold the indexes against themselves and the disk."""
        report = Report({"host": 0, "nvme": 0}, {"host": 0, "nvme": 0}, (), ())
        faults: list[Fault] = []
        for tier, (tenant, digest), length in tuple(self.kept()):
            outcome = await self.examine(tier, tenant, digest)
            report.chunks[tier] += 1
            report.bytes[tier] += length
            if outcome in FAULTS and len(faults) < MAX_TOLD:
                faults.append(Fault(tier, tenant, digest, outcome))
        strangers = await self._nvme.strangers()
        contradictions = [f"{tenant}/{digest}: a file that is in no index" for tenant, digest in strangers]
        indexes = ("host", self._arena.index.check_integrity), ("nvme", self._nvme.index.check_integrity)
        for name, check_integrity in indexes:
            try:
                check_integrity()
            except AssertionError as error:
                contradictions.append(f"the index of the tier {name}: {str(error) or 'its sums are wrong'}")
        return Report(report.chunks, report.bytes, tuple(faults), tuple(contradictions[:MAX_TOLD]))

    async def _in_memory(self, tenant: str, digest: str) -> Outcome:
        index = self._arena.index
        place = index.try_place(tenant, digest)
        if place is None:
            return Outcome.ABSENT
        index.pin((place.slab,))
        try:
            if await self._verifier.is_right(await self._arena.view(place), digest):
                return Outcome.WHOLE
            if index.try_place(tenant, digest) != place:
                return Outcome.ABSENT  # another look found it meanwhile; what is there now is another copy
            self._counters.chunk_faults["host"][Outcome.DIGEST] += 1
            self._forget(place.slab)
            index.condemn(tenant, digest)
            self._wrong[Damage(tenant, digest, place)] = None
            return Outcome.DIGEST
        finally:
            self._arena.unpin((place.slab,))

    async def _in_file(self, tenant: str, digest: str) -> Outcome:
        key = (tenant, digest)
        if not self._nvme.index.holds(key):
            return Outcome.ABSENT
        buffer = memoryview(mmap.mmap(-1, max(self._nvme.index.length(key), mmap.PAGESIZE)))
        buffer = buffer[: self._nvme.index.length(key)]
        try:
            outcome = await self._nvme.look(tenant, digest, buffer)
        except Refused:  # the disk does not answer now: says nothing about the file
            return Outcome.AWAY
        return await self._verifier.check(self._nvme, outcome, tenant, digest, buffer)


class Scrubber:
    """A pass every `interval_s` seconds, at BYTES_PER_S; `is_busy` says when to pause."""

    def __init__(
        self,
        examiner: Examiner,
        interval_s: float,
        is_busy: Callable[[], bool],
        counters: Counters,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._examiner = examiner
        self._interval_s = interval_s
        self._is_busy = is_busy
        self._counters = counters
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"<Scrubber every {self._interval_s:g} s>"

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(self._interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """One pass over all that is kept as it begins."""
        for tier, key, length in tuple(self._examiner.kept()):
            while self._is_busy():
                await self._sleep(BUSY_S)
            with isolated(key):
                await self._examiner.examine(tier, *key)
            await self._sleep(length / BYTES_PER_S)
        self._counters.sweeps += 1
