"""The peer tier: read chunks from other nodes, and let one node, the chunk's owner, read it from the store for all.

A load waits for the owner before it queues at any source, and looks for an owner again when its turn at the store has
come. What a peer sends is verified like the bytes of any source.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.errors import Refused
from weightcache.peers.ownership_policy import ChunkState
from weightcache.peers.peer_client import Peer, PeerBusy
from weightcache.peers.peer_group import Key, PeerGroup
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.source import UNLIMITED_READ_SLOT, ReadSlot, Source

PAUSE_S: Final = 0.02  # before all that have a chunk are looked at again, as they were busy
MAX_PEER_READS: Final = 8  # from all peers


class OwnerChanged(Exception):
    """Another node became the chunk's owner while the load waited for the store. The load has to decide again."""


class PeerTier:
    """A `Source`. Each load of a chunk is within `loading`, asks, and waits while an owner is to be waited for."""

    tier = "peer"
    attempts = 2  # another node may have it right

    def __init__(self, group: PeerGroup, is_local: Callable[[str, str], bool]) -> None:
        self.group = group
        self.room = ChunkCountLimit(MAX_PEER_READS)
        self._is_local = is_local
        self._last_senders: dict[Key, Peer] = {}

    def __repr__(self) -> str:
        return f"<PeerTier {self.group!r}>"

    @contextmanager
    def loading(self, key: Key) -> Iterator[None]:
        """Other nodes are told that the chunk is wanted here while the block runs."""
        with self.group.loading(key):
            try:
                yield
            finally:
                self._last_senders.pop(key, None)

    async def ask(self, key: Key) -> None:
        """Ask the other nodes about the chunk, unless it is on this node's disk."""
        if self._is_local(*key):
            self.group.take_ownership(key)
        else:
            await self.group.ask(key)

    def owner(self, key: Key) -> Peer | None:
        """Return the node that will have the chunk and is to be waited for, if there is one."""
        found = self.group.choose(key)
        return None if found is None or found[1] is ChunkState.READY else found[0]

    async def wait(self, key: Key, owner: Peer) -> None:
        """Wait for the owner, for a bounded time, if it still is. See `PeerGroup.wait`."""
        if self.owner(key) is owner:
            await self.group.wait(key, owner)

    def may_have(self, tenant: str, digest: str) -> bool:
        """See `Source`. Nobody was asked about a chunk on this node's disk."""
        key = tenant, digest
        return not self.group.was_asked(key) or self._holder(key) is not None

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, turn: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """See `Source`. `ABSENT` where no node that answers has it now."""
        key = tenant, digest
        await self.group.ask(key)  # of a chunk on this node's disk, whose copy is wrong
        away: Refused | None = None
        while (peer := self._holder(key)) is not None:
            if peer.is_busy:
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                outcome = await peer.fetch(tenant, digest, into)
            except PeerBusy:
                continue
            except Refused as refused:
                away = refused
                self.group.forget(peer)
                continue
            if outcome is ReadOutcome.ABSENT:
                self.group.forget(peer, key)
                continue
            self._last_senders[key] = peer
            return outcome
        if away is not None:
            raise away
        return ReadOutcome.ABSENT

    async def quarantine(self, tenant: str, digest: str) -> None:
        """See `Source`. The peer that sent the chunk is not asked for anything for a while."""
        key = tenant, digest
        peer = self._last_senders.pop(key, None)
        if peer is not None:
            self.group.take_ownership(key)
            peer.set_aside()
            self.group.forget(peer)

    def _holder(self, key: Key) -> Peer | None:
        found = self.group.choose(key)
        return found[0] if found is not None and found[1] is ChunkState.READY else None


@dataclass(frozen=True, slots=True)
class _ProgressSlot:
    """A turn of which the group hears part by part: an owner is waited for as long as something arrives here."""

    turn: ReadSlot
    group: PeerGroup

    async def part(self, nbytes: int) -> int:
        """See `ReadSlot`."""
        return await self.turn.part(nbytes)

    def record_arrival(self, nbytes: int) -> None:
        """See `ReadSlot`."""
        self.group.note_moved()
        self.turn.record_arrival(nbytes)


class SharedStore:
    """A `Source` around the store's: read by one node for all. `fetch` raises `OwnerChanged`, too."""

    def __init__(self, inner: Source, group: PeerGroup) -> None:
        self._inner = inner
        self._group = group
        self.tier = inner.tier
        self.attempts = inner.attempts
        self.room = inner.room

    def __repr__(self) -> str:
        return f"<SharedStore {self._inner!r}>"

    def may_have(self, tenant: str, digest: str) -> bool:
        """See `Source`."""
        return self._inner.may_have(tenant, digest)

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, turn: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """See `Source`."""
        if not self._group.claim((tenant, digest)):
            raise OwnerChanged
        return await self._inner.fetch(tenant, digest, into, _ProgressSlot(turn, self._group))

    async def quarantine(self, tenant: str, digest: str) -> None:
        """See `Source`."""
        await self._inner.quarantine(tenant, digest)
