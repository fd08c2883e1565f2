"""Chunks that other nodes may be given: verified ones of the host tier, and of NVMe what is verified before it leaves.

What is handed out stays in place until the block that has it is left, and so much is out at once, not more.
"""

import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from contracts.errors import NotFound, Refused
from contracts.traffic_errors import Overloaded
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.nvme import NvmeTier
from weightcache.policy.healing import ARRIVED
from weightcache.verifying import Verifier

MAX_OUT: Final = 64  # answers
MAX_OUT_BYTES: Final = 512 << 20  # of chunks; a larger one goes alone
RETRY_S: Final = 1.0


class Shelf:
    """Over the tiers of one agent."""

    def __init__(
        self, arena: Arena, nvme: NvmeTier, verifier: Verifier, counters: Counters, *,
        max_out: int = MAX_OUT, max_out_bytes: int = MAX_OUT_BYTES,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._nvme = nvme
        self._verifier = verifier
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
            raise Refused(Overloaded("what other nodes may have at once", self._max_out, RETRY_S, "chunks"))
        self.out, self.out_bytes = self.out + 1, self.out_bytes + length
        try:
            if place is None:
                with mmap.mmap(-1, length) as memory, memoryview(memory) as view:
                    read = await self._nvme.fetch(tenant, digest, view)
                    if await self._verifier.check(self._nvme, read, tenant, digest, view) not in ARRIVED:
                        raise Refused(NotFound("chunk", digest))
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
