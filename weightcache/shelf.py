"""Chunks that other nodes may be given: verified ones of the host tier, and of NVMe what is verified before it leaves.

What is handed out stays in place until the block that has it is left, and so much is out at once, not more.
"""

import mmap
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Final

from blobstore.threads import to_the_end
from contracts.errors import NotFound, Overloaded, Refused
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.nvme import NvmeTier
from weightcache.policy.healing import FAULTS, Outcome
from weightcache.sources import Verify

MAX_OUT: Final = 64  # answers
MAX_OUT_BYTES: Final = 512 << 20  # of chunks; a larger one goes alone
RETRY_S: Final = 1.0


class Shelf:
    """Over the tiers of one agent."""

    def __init__(
        self, arena: Arena, nvme: NvmeTier, hashes: Executor, verify: Verify, counters: Counters, *,
        max_out: int = MAX_OUT, max_out_bytes: int = MAX_OUT_BYTES,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._nvme = nvme
        self._hashes = hashes
        self._verify = verify
        self._counters = counters
        self._max_out = max_out
        self._max_out_bytes = max_out_bytes
        self.out = 0
        self.out_bytes = 0

    def __repr__(self) -> str:
        return f"<Shelf out={self.out}/{self._max_out} bytes={self.out_bytes}/{self._max_out_bytes}>"

    def has(self, tenant: str, digest: str) -> bool:
        """Whether it would be handed out."""
        return self._arena.index.is_ready(tenant, digest) or self._nvme.index.holds((tenant, digest))

    @asynccontextmanager
    async def taken(self, tenant: str, digest: str) -> AsyncIterator[memoryview]:
        """The chunk's right bytes, read-only. Raises `Refused`: NotFound, Overloaded, Unavailable."""
        if not self.has(tenant, digest):
            raise Refused(NotFound("chunk", digest))
        place = self._arena.index.try_place(tenant, digest)
        length = self._nvme.index.length((tenant, digest)) if place is None else place.length
        if self.out >= self._max_out or (self.out and self.out_bytes + length > self._max_out_bytes):
            self._counters.peer_refusals += 1
            raise Refused(Overloaded("what other nodes may have at once", self._max_out, RETRY_S))
        self.out, self.out_bytes = self.out + 1, self.out_bytes + length
        try:
            if place is None:
                with mmap.mmap(-1, length) as memory, memoryview(memory) as view:
                    await self._read(tenant, digest, view)
                    with view.toreadonly() as lent:
                        yield lent
            else:
                self._arena.index.pin((place.slab,))
                try:
                    yield (await self._arena.view(place)).toreadonly()
                finally:
                    self._arena.unpin((place.slab,))
        finally:
            self.out, self.out_bytes = self.out - 1, self.out_bytes - length

    async def _read(self, tenant: str, digest: str, into: memoryview) -> None:
        """From NVMe. A copy that is wrong is set aside here, so that no other node is sent it."""
        outcome = await self._nvme.fetch(tenant, digest, into)
        if outcome is Outcome.WHOLE:
            verified = await to_the_end(self._hashes, self._verify, into, digest)
            outcome = Outcome.VERIFIED if verified else Outcome.DIGEST
        if outcome is Outcome.VERIFIED:
            return
        if outcome in FAULTS:
            self._counters.chunk_faults[self._nvme.tier][outcome] += 1
            await self._nvme.quarantine(tenant, digest)
        raise Refused(NotFound("chunk", digest))
