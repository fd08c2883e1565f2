"""Have a chunk on NVMe again whose file was found wrong though nobody asked for it: from memory, or from below."""

import asyncio
import logging
from typing import Final

from contracts.errors import Refused
from contracts.traffic_errors import DeadlineExceeded
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.keeper import Keeper
from weightcache.remote import StoreTier

log = logging.getLogger(__name__)

MEND_S: Final = 60.0


class Mender:
    """What can't be healed now is healed by the next load that wants it, or refused there by name."""

    def __init__(self, arena: Arena, keeper: Keeper, remote: StoreTier, counters: Counters) -> None:
        self._arena = arena
        self._keeper = keeper
        self._remote = remote
        self._counters = counters

    def __repr__(self) -> str:
        return f"<Mender over {self._keeper!r}>"

    async def mend(self, tenant: str, digest: str) -> None:
        """Returns when it is kept again, or can't be."""
        seen = {"tenant": tenant, "chunk": digest}
        try:
            async with asyncio.timeout(MEND_S):
                tier = await self._keep(tenant, digest)
        except TimeoutError:
            why = DeadlineExceeded(MEND_S, "healing").message
            log.warning("a kept chunk was not healed", extra={**seen, "why": why})
        except Refused as refused:
            log.warning("a kept chunk was not healed", extra={**seen, "why": refused.failure.message})
        else:
            if tier is not None:
                self._counters.healed_chunks[tier] += 1
                log.warning("a kept chunk was healed", extra={**seen, "healed_from": tier})

    async def _keep(self, tenant: str, digest: str) -> str | None:
        """A faulty file does not say how long its chunk is."""
        place = self._arena.index.try_place(tenant, digest)
        length = await self._remote.length_of(tenant, digest) if place is None else place.length
        return None if length is None else await self._keeper.ensure(tenant, digest, length)
