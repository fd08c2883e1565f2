"""Look again at one chunk that is kept: in memory or in a file, it is hashed anew, and dropped where it is wrong.

A chunk of the host tier that changed after its check is in no lease from then on: its versions are no longer resident,
and the next one brings it anew, into another place. Processes that have its slab mapped still see it: who they are is
told for as long as they live.
"""

import logging
import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

from blobstore.threads import to_the_end
from contracts.errors import Refused
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.nvme import NvmeTier
from weightcache.policy.healing import FAULTS, Outcome
from weightcache.sources import Verify

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk in memory that is not what it was, and the holders of its slab that live."""

    tenant: str
    digest: str
    slab: int
    holders: frozenset[int]


class Examiner:
    """One chunk after another. `forget` is told the slab of each that was wrong in memory."""

    def __init__(
        self,
        arena: Arena,
        nvme: NvmeTier,
        hashes: Executor,
        verify: Verify,
        counters: Counters,
        forget: Callable[[int], None],
    ) -> None:
        self._arena = arena
        self._nvme = nvme
        self._hashes = hashes
        self._verify = verify
        self._counters = counters
        self._forget = forget
        self._wrong: dict[tuple[str, str, int], None] = {}

    def __repr__(self) -> str:
        return f"<Examiner damages={len(self.damages())}>"

    def damages(self) -> tuple[Damage, ...]:
        """Chunks that were found wrong in memory which living processes may have mapped."""
        self._wrong = {key: None for key in self._wrong if self._arena.index.holders_of(key[2])}
        return tuple(Damage(*key, self._arena.index.holders_of(key[2])) for key in self._wrong)

    def kept(self) -> Iterable[tuple[str, tuple[str, str], int]]:
        """(tier, (tenant, digest), length) of all that is kept now."""
        yield from (("host", key, length) for key, length in self._arena.index.ready_chunks())
        yield from (("nvme", key, self._nvme.index.length(key)) for key in self._nvme.index.select(None, None))

    async def examine(self, tier: str, tenant: str, digest: str) -> Outcome:
        """What the tier's copy is; a faulty one is dropped, told and counted. `ABSENT` where there is none any more."""
        outcome = await (self._in_memory if tier == "host" else self._in_file)(tenant, digest)
        self._counters.examined[tier] += outcome is not Outcome.ABSENT
        if outcome in FAULTS:
            self._counters.chunk_faults[tier][outcome] += 1
            seen = {"tenant": tenant, "chunk": digest, "tier": tier, "kind": outcome}
            log.error("a kept chunk is faulty", extra=seen)
        return outcome

    async def _in_memory(self, tenant: str, digest: str) -> Outcome:
        index = self._arena.index
        place = index.try_place(tenant, digest)
        if place is None:
            return Outcome.ABSENT
        index.pin((place.slab,))
        try:
            if await to_the_end(self._hashes, self._verify, await self._arena.view(place), digest):
                return Outcome.WHOLE
            self._forget(place.slab)
            index.condemn(tenant, digest)
            self._wrong[tenant, digest, place.slab] = None
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
        if outcome is Outcome.WHOLE and not await to_the_end(self._hashes, self._verify, buffer, digest):
            outcome = Outcome.DIGEST
        if outcome in FAULTS:
            await self._nvme.quarantine(tenant, digest)
        return outcome
