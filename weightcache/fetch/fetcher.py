"""Get correct bytes of an object from the first source that has them. A faulty copy is quarantined and the next one
read.

Callers wait meanwhile. Each faulty copy is counted. Once the load was healed (by another tier, or by a second read of
the same one) or refused, each faulty copy is logged in one line.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Final

from kelvin.contracts.artifact_errors import ChunkCorrupt, ChunkMissing
from kelvin.contracts.errors import Failure, Refused
from weightcache.counters import Counters
from weightcache.fetch.read_scheduler import ReadScheduler
from weightcache.peers.peer_tier import OwnerChanged, PeerTier
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit
from weightcache.sources.policy.healing import (
    ABSENT_OUTCOMES,
    Fetched,
    ReadAttempt,
    ReadOutcome,
    SourceRule,
    TrySource,
    Unrecoverable,
    choose_step,
)
from weightcache.sources.source import ReadSlot, Source
from weightcache.sources.verifier import Verifier

log = logging.getLogger(__name__)

MAX_OWNER_WAITS: Final = 16  # chunks waiting for one owner; chunks of other owners, or of none, don't queue behind them


async def read_healed(
    rules: Sequence[SourceRule],
    read_source: Callable[[int], Awaitable[ReadAttempt]],
    what: str,
    log_fields: dict[str, str],
    healed_counts: Counter[str],
) -> Fetched | Unrecoverable:
    """Read from the sources of `rules`, by position, until one has a correct copy or none has. Each faulty copy of
    `what` is logged in one line with `log_fields`. A healed load counts once in `healed_counts`.
    """
    attempts: list[ReadAttempt] = []
    while isinstance(step := choose_step(rules, attempts), TrySource):
        attempts.append(await read_source(step.position))
    healed_from = step.tier if isinstance(step, Fetched) else None
    faults = [attempt for attempt in attempts if attempt.is_fault]
    if faults and healed_from is not None:
        healed_counts[healed_from] += 1
    for fault in faults:
        fields = {**log_fields, "tier": fault.tier, "kind": fault.outcome, "healed_from": healed_from}
        if healed_from is None:
            log.error(f"a faulty {what} was not healed", extra=fields)
        else:
            log.warning(f"a faulty {what} was healed", extra=fields)
    return step


class Fetcher:
    """Fetches chunks from `sources` in order, and waits for a slot of each source."""

    def __init__(
        self, sources: Sequence[Source], verifier: Verifier, counters: Counters, peers: PeerTier | None = None
    ) -> None:
        self._sources = sources
        self._rules = tuple(SourceRule(source.tier, source.attempts) for source in sources)
        self._verifier = verifier
        self._counters = counters
        self._peers = peers
        tiers = {source.tier: source.read_limit for source in sources}
        # A chunk may be needed in memory and on disk at once. Each of the two has its own lane to wait for the owner.
        owners = () if peers is None else tuple((peer, below) for peer in peers.group.peers for below in (False, True))
        self.scheduler = ReadScheduler(tiers, dict.fromkeys(owners, ChunkCountLimit(MAX_OWNER_WAITS)))
        self._is_for_disk = False

    def below_first_source(self) -> "Fetcher":
        """Return a fetcher of the sources below the first one. The two fetchers share the scheduler."""
        below = copy(self)
        below._sources, below._rules, below._is_for_disk = self._sources[1:], self._rules[1:], True
        return below

    async def fetch(self, tenant: str, digest: str, into: memoryview) -> str:
        """Fill `into` (page-aligned, whole pages) with the verified chunk. Return the tier that it came from.

        Raises `Refused`: `ChunkCorrupt` or `ChunkMissing` if no source has a good copy; a retryable failure if a source
        that may have it does not answer; `Cancelled` if all loads of the chunk ended while it waited for a slot. Once
        this returns, raises or is cancelled, nothing writes to `into`.
        """
        if self._peers is None:
            return await self._fetch(tenant, digest, into)
        key = tenant, digest
        with self._peers.mark_wanted(key):
            while True:
                await self._peers.query_peers(key)
                # While another node will have the chunk, wait for it in that node's own queue.
                while (owner := self._peers.find_owner(key)) is not None:
                    async with self.scheduler.hold_slot((owner, self._is_for_disk), key, into.nbytes):
                        await self._peers.wait_for_owner(key, owner)
                with suppress(OwnerChanged):  # if it changed while the chunk waited for the store, choose again
                    return await self._fetch(tenant, digest, into)

    async def _fetch(self, tenant: str, digest: str, into: memoryview) -> str:
        log_fields = {"tenant": tenant, "chunk": digest}

        async def read_source(position: int) -> ReadAttempt:
            return await self._try_source(self._sources[position], tenant, digest, into)

        match await read_healed(self._rules, read_source, "chunk", log_fields, self._counters.healed_chunks):
            case Fetched(tier):
                return tier
            case Unrecoverable(decisive):
                failure = _failure(digest, decisive)
                self._counters.refused_chunks[failure.code] += 1
                raise Refused(failure)

    async def _try_source(self, source: Source, tenant: str, digest: str, into: memoryview) -> ReadAttempt:
        """Wait for a slot of the source and read. Returns at once if the source can't have the chunk."""
        if not source.may_have(tenant, digest):
            return ReadAttempt(source.tier, ReadOutcome.ABSENT)
        async with self.scheduler.hold_slot(source.tier, (tenant, digest), into.nbytes) as slot:
            return await self._read_once(source, tenant, digest, into, slot)

    async def _read_once(
        self, source: Source, tenant: str, digest: str, into: memoryview, slot: ReadSlot
    ) -> ReadAttempt:
        """Read the chunk once and verify it. A faulty copy is quarantined."""
        try:
            outcome = await source.fetch(tenant, digest, into, slot)
        except Refused as refused:
            if not refused.failure.retryable:
                raise
            log.warning("a source is unavailable", extra={"tenant": tenant, "chunk": digest, "tier": source.tier})
            return ReadAttempt(source.tier, ReadOutcome.AWAY, refused.failure)
        if outcome not in ABSENT_OUTCOMES:
            self._counters.count_read(source.tier, into.nbytes)
        return ReadAttempt(source.tier, await self._verifier.verify_read(source, outcome, tenant, digest, into))


def _failure(digest: str, decisive: ReadAttempt) -> Failure:
    if decisive.failure is not None:
        return decisive.failure
    if decisive.outcome in ABSENT_OUTCOMES:
        return ChunkMissing(digest)
    return ChunkCorrupt(digest, decisive.tier)
