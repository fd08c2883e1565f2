"""The peer tier: read chunks from other nodes, and let one node, the chunk's owner, read it from the store for all.

A load waits for the owner before it queues at any source. When its slot at the store is free, it checks for an owner
again. Bytes from a peer are verified like those of any source.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.errors import Refused
from weightcache.peers.ownership_policy import ChunkState
from weightcache.peers.peer_client import Peer, PeerBusy
from weightcache.peers.peer_group import PeerGroup
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit, ChunkKey
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.source import UNLIMITED_READ_SLOT, ReadSlot, Source

BUSY_PAUSE_S: Final = 0.02  # pause before retrying when all nodes with a chunk are busy
MAX_PEER_READS: Final = 8  # from all peers


class OwnerChanged(Exception):
    """Another node became the chunk's owner while the load waited for the store. The load must choose again."""


class PeerTier:
    """A `Source`. A load uses it inside `mark_wanted`: it calls `query_peers`, then `wait_for_owner` while there
    is one.
    """

    tier = "peer"
    attempts = 2  # another node may have a good copy

    def __init__(self, group: PeerGroup, is_local: Callable[[str, str], bool]) -> None:
        self.group = group
        self.read_limit = ChunkCountLimit(MAX_PEER_READS)
        self._is_local = is_local
        self._last_senders: dict[ChunkKey, Peer] = {}

    @contextmanager
    def mark_wanted(self, key: ChunkKey) -> Iterator[None]:
        """Tell other nodes that this node wants the chunk while the block runs."""
        with self.group.mark_wanted(key):
            try:
                yield
            finally:
                self._last_senders.pop(key, None)

    async def query_peers(self, key: ChunkKey) -> None:
        """Query the other nodes about the chunk, unless it is on this node's disk."""
        if self._is_local(*key):
            self.group.force_ownership(key)
        else:
            await self.group.query_peers(key)

    def find_owner(self, key: ChunkKey) -> Peer | None:
        """Return the node to wait for because it will have the chunk, or None."""
        found = self.group.choose_peer(key)
        return None if found is None or found[1] is ChunkState.READY else found[0]

    async def wait_for_owner(self, key: ChunkKey, owner: Peer) -> None:
        """Wait for the owner, for a bounded time, if it still owns the chunk. See `PeerGroup.wait_for_owner`."""
        if self.find_owner(key) is owner:
            await self.group.wait_for_owner(key, owner)

    def may_have(self, tenant: str, digest: str) -> bool:
        """Return whether a peer may have the chunk. True if none was queried, as the chunk is on this node's disk."""
        key = tenant, digest
        return not self.group.was_queried(key) or self._find_holder(key) is not None

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, slot: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """Fetch as `Source.fetch` does. Returns `ABSENT` if no reachable node has the chunk now."""
        key = tenant, digest
        await self.group.query_peers(key)  # needed if the copy on this node's disk is wrong
        unavailable: Refused | None = None
        while (peer := self._find_holder(key)) is not None:
            if peer.is_busy:
                await asyncio.sleep(BUSY_PAUSE_S)
                continue
            try:
                outcome = await peer.fetch(tenant, digest, into)
            except PeerBusy:
                continue
            except Refused as refused:
                unavailable = refused
                self.group.forget_states(peer)
                continue
            if outcome is ReadOutcome.ABSENT:
                self.group.forget_states(peer, key)
                continue
            self._last_senders[key] = peer
            return outcome
        if unavailable is not None:
            raise unavailable
        return ReadOutcome.ABSENT

    async def quarantine(self, tenant: str, digest: str) -> None:
        """Don't use the peer that sent the chunk for a while."""
        key = tenant, digest
        peer = self._last_senders.pop(key, None)
        if peer is not None:
            self.group.force_ownership(key)
            peer.set_aside()
            self.group.forget_states(peer)

    def _find_holder(self, key: ChunkKey) -> Peer | None:
        found = self.group.choose_peer(key)
        return found[0] if found is not None and found[1] is ChunkState.READY else None


@dataclass(frozen=True, slots=True)
class _ProgressSlot:
    """A read slot that reports each part to the group: other nodes wait for an owner as long as bytes arrive at it."""

    slot: ReadSlot
    group: PeerGroup

    async def request_part(self, nbytes: int) -> int:
        return await self.slot.request_part(nbytes)

    def record_arrival(self, nbytes: int) -> None:
        self.group.record_progress()
        self.slot.record_arrival(nbytes)


class SharedStore:
    """A `Source` around the store's: one node reads each chunk for all. `fetch` may also raise `OwnerChanged`."""

    def __init__(self, inner: Source, group: PeerGroup) -> None:
        self._inner = inner
        self._group = group
        self.tier = inner.tier
        self.attempts = inner.attempts
        self.read_limit = inner.read_limit

    def may_have(self, tenant: str, digest: str) -> bool:
        return self._inner.may_have(tenant, digest)

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, slot: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """Fetch as `Source.fetch` does. Raises `OwnerChanged` if another node owns the chunk now."""
        if not self._group.try_claim((tenant, digest)):
            raise OwnerChanged
        return await self._inner.fetch(tenant, digest, into, _ProgressSlot(slot, self._group))

    async def quarantine(self, tenant: str, digest: str) -> None:
        await self._inner.quarantine(tenant, digest)
