"""Verify kept chunks again: hash each chunk in memory and on disk, and drop damaged ones.

The `Scrubber` verifies everything periodically while nothing loads. `examine_all` verifies at once, for an operator.

A chunk in the host tier that changed after its first check is not leased again. Its versions are no longer resident,
and their next load puts the chunk into another place. Processes that map the old place still see the damaged bytes, so
`damaged_chunks` lists the chunk while its slab exists. A faulty file is quarantined, and its chunk written again from a
good copy.
"""

import asyncio
import logging
import mmap
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.errors import Refused
from kelvin.process.loops import contain_errors
from weightcache.counters import Counters
from weightcache.host.arena import Arena
from weightcache.host.policy.extents import SlabRange
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.sources.policy.healing import FAULTS, UNREAD_OUTCOMES, ReadOutcome
from weightcache.sources.verifier import Verifier

log = logging.getLogger(__name__)
BYTES_PER_S: Final = 64 << 20  # 1 % of a core, and little of a disk's bandwidth
BUSY_PAUSE_S: Final = 0.2
MAX_NAMED_FAULTS: Final = 1000  # faults that a check lists; all are counted


@dataclass(frozen=True, slots=True)
class MemoryDamage:
    """A chunk that changed in memory, and its place."""

    tenant: str
    digest: str
    place: SlabRange


@dataclass(frozen=True, slots=True)
class Fault:
    """A kept chunk that was faulty. `kind` is a `ReadOutcome` of `sources/policy/healing.py`."""

    tier: str
    tenant: str
    chunk: str
    kind: str


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """Result of a check: hashed chunks and bytes by tier, faults, and what contradicts the indexes or was not read."""

    chunks: dict[str, int]
    bytes: dict[str, int]
    faults: tuple[Fault, ...]
    contradictions: tuple[str, ...]


class ChunkExaminer:
    """Examines chunks. `examine_all` and a pass of the scrubber may run at once. `on_damage` is called with the slab of
    a chunk that was damaged in memory. `rewrite` writes a tenant's chunk to NVMe again.
    """

    def __init__(
        self,
        arena: Arena,
        nvme: NvmeTier,
        verifier: Verifier,
        counters: Counters,
        on_damage: Callable[[int], None],
        rewrite: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._arena = arena
        self._nvme = nvme
        self._verifier = verifier
        self._counters = counters
        self._on_damage = on_damage
        self._rewrite = rewrite
        self._damaged: dict[MemoryDamage, None] = {}

    def damaged_chunks(self) -> tuple[MemoryDamage, ...]:
        """Return damaged chunks in slabs that still exist: processes may have them mapped."""
        self._damaged = {damage: None for damage in self._damaged if self._arena.index.has_slab(damage.place.slab)}
        return tuple(self._damaged)

    def stored_chunks(self) -> Iterable[tuple[str, tuple[str, str], int]]:
        """Yield (tier, (tenant, digest), length in bytes) of each chunk that is kept now."""
        yield from (("host", key, length) for key, length in self._arena.index.ready_chunks())
        yield from (("nvme", key, self._nvme.index.length(key)) for key in self._nvme.index.select(None, None))

    async def examine(self, tier: str, tenant: str, digest: str) -> ReadOutcome:
        """Examine the tier's copy. Drop, log and count a faulty one. Return `ABSENT` if there is no copy any more.

        After a faulty file, the copy in memory is examined as well, and the file is written again.
        """
        outcome = await (self._examine_memory if tier == "host" else self._examine_file)(tenant, digest)
        self._counters.examined_chunks[tier] += outcome not in UNREAD_OUTCOMES
        if outcome in FAULTS:
            fields = {"tenant": tenant, "chunk": digest, "tier": tier, "kind": outcome}
            log.error("a kept chunk is faulty", extra=fields)
        if tier == "nvme" and outcome in FAULTS:
            await self.examine("host", tenant, digest)  # check memory first, because the rewrite may use that copy
            await self._rewrite(tenant, digest)
        return outcome

    async def examine_all(self) -> ScrubReport:
        """Examine all kept chunks without a pause, and compare the indexes with themselves and the disk."""
        report = ScrubReport({"host": 0, "nvme": 0}, {"host": 0, "nvme": 0}, (), ())
        faults: list[Fault] = []
        unanswered = 0
        for tier, (tenant, digest), length in tuple(self.stored_chunks()):
            outcome = await self.examine(tier, tenant, digest)
            unanswered += outcome is ReadOutcome.AWAY
            report.chunks[tier] += outcome not in UNREAD_OUTCOMES
            report.bytes[tier] += 0 if outcome in UNREAD_OUTCOMES else length
            if outcome in FAULTS and len(faults) < MAX_NAMED_FAULTS:
                faults.append(Fault(tier, tenant, digest, outcome))
        unindexed_files = await self._nvme.unindexed_files()
        contradictions = [f"{tenant}/{digest}: a file that is in no index" for tenant, digest in unindexed_files]
        if unanswered:
            contradictions.append(f"the tier nvme: its disk did not answer for {unanswered} chunks")
        indexes = ("host", self._arena.index.check_integrity), ("nvme", self._nvme.index.check_integrity)
        for name, check_integrity in indexes:
            try:
                check_integrity()
            except AssertionError as error:
                contradictions.append(f"the index of the tier {name}: {str(error) or 'its sums are wrong'}")
        return ScrubReport(report.chunks, report.bytes, tuple(faults), tuple(contradictions[:MAX_NAMED_FAULTS]))

    async def _examine_memory(self, tenant: str, digest: str) -> ReadOutcome:
        index = self._arena.index
        place = index.try_place(tenant, digest)
        if place is None:
            return ReadOutcome.ABSENT
        index.pin((place.slab,))
        try:
            if await self._verifier.matches_digest(await self._arena.view(place), digest):
                return ReadOutcome.WHOLE
            if index.try_place(tenant, digest) != place:
                return ReadOutcome.ABSENT  # another examination found it meanwhile; the current chunk is another copy
            self._counters.chunk_faults["host"][ReadOutcome.DIGEST] += 1
            self._on_damage(place.slab)
            index.drop_damaged(tenant, digest)
            self._damaged[MemoryDamage(tenant, digest, place)] = None
            return ReadOutcome.DIGEST
        finally:
            self._arena.unpin((place.slab,))

    async def _examine_file(self, tenant: str, digest: str) -> ReadOutcome:
        key = (tenant, digest)
        if not self._nvme.index.is_readable(key):
            return ReadOutcome.ABSENT
        buffer = memoryview(mmap.mmap(-1, max(self._nvme.index.length(key), mmap.PAGESIZE)))
        buffer = buffer[: self._nvme.index.length(key)]
        try:
            outcome = await self._nvme.read_for_scrub(tenant, digest, buffer)
        except Refused:  # the disk does not answer now, so the file is not judged
            return ReadOutcome.AWAY
        return await self._verifier.verify_read(self._nvme, outcome, tenant, digest, buffer)


class Scrubber:
    """Makes passes at BYTES_PER_S, `interval_s` seconds apart. A pass pauses while `is_busy` returns True."""

    def __init__(
        self,
        examiner: ChunkExaminer,
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

    async def run(self) -> None:
        """Make passes until cancelled."""
        while True:
            await self._sleep(self._interval_s)
            await self.run_pass()

    async def run_pass(self) -> None:
        """Make one pass over the chunks that are kept at its start."""
        for tier, key, length in tuple(self._examiner.stored_chunks()):
            while self._is_busy():
                await self._sleep(BUSY_PAUSE_S)
            with contain_errors(key):
                await self._examiner.examine(tier, *key)
            await self._sleep(length / BYTES_PER_S)
        self._counters.scrub_passes += 1
