"""The peer tier: chunks from other nodes; and the store behind it, which one node reads for all of them.

A load decides before it queues at any source: it waits there for a node that will have the chunk, so that waiting holds
nobody up, and decides again when its turn at the store has come. What comes is verified like any source's.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from contracts.errors import Refused
from weightcache.peer_board import Board, Key
from weightcache.peer_client import Peer, PeerBusy
from weightcache.policy.healing import NOT_THERE, Outcome
from weightcache.policy.mixing import Await, Choice, FromPeer, FromStore, Pause, choose
from weightcache.policy.pace import Pace
from weightcache.policy.sharing import Limit
from weightcache.sources import ALL_AT_ONCE, Source, Turn

SETTLE_S: Final = 0.05  # what nodes that begin in the same moment have to hear of one another
PATIENCE_S: Final = 30.0  # for which others are waited for while no chunk at all arrives here
LOOK_S: Final = 2.0  # a wait is looked at again
PAUSE_S: Final = 0.02
READS_AT_ONCE: Final = 8  # from all peers


class Elsewhere(Exception):
    """While a load stood in line for the store another node got the chunk, or is about to: it decides anew."""


class _Plan(StrEnum):
    LOCAL = "local"
    PEER = "peer"
    STORE = "store"
    HEAL = "heal"  # from the store whatever others say: what they had was wrong


class PeerTier:
    """A `Source`. Each load of a chunk is within `loading`, and decides before it asks."""

    tier = "peer"
    attempts = 2  # another node may have it right

    def __init__(
        self, board: Board, is_local: Callable[[str, str], bool], clock: Callable[[], float], reads: int = READS_AT_ONCE
    ) -> None:
        self.board = board
        self.room = Limit(reads)
        self.pace = Pace()  # of all peers
        self.store_pace = Pace()
        self._is_local = is_local
        self._clock = clock
        self._plans: dict[Key, _Plan] = {}
        self._gave: dict[Key, Peer] = {}

    def __repr__(self) -> str:
        return f"<PeerTier {self.board!r}>"

    @contextmanager
    def loading(self, key: Key) -> Iterator[None]:
        """Other nodes are told that the chunk is wanted here while the block runs."""
        with self.board.loading(key):
            try:
                yield
            finally:
                self._plans.pop(key, None)
                self._gave.pop(key, None)

    async def decide(self, key: Key, nbytes: int, is_wanted: Callable[[], bool]) -> None:
        """Returns once it is known where the chunk comes from, or nobody waits for it any more."""
        if self._is_local(*key):
            self._claim(key, _Plan.LOCAL)
            return
        self._plans[key] = _Plan.STORE
        while is_wanted():
            if self.board.is_stale(key):
                await self.board.ask(key)
            match self._look(key, nbytes):
                case Await(node) if (peer := self.board.named(node)) is not None:
                    await self.board.hear_of(key, peer, LOOK_S)
                case FromPeer():
                    self._plans[key] = _Plan.PEER
                    return
                case FromStore():
                    return
                case _:
                    await asyncio.sleep(PAUSE_S)

    def may_have(self, tenant: str, digest: str) -> bool:
        """See `Source`. What was decided to come from the store passes by."""
        return self._plans.get((tenant, digest), _Plan.STORE) is not _Plan.STORE

    async def fetch(self, tenant: str, digest: str, into: memoryview, turn: Turn = ALL_AT_ONCE) -> Outcome:
        """See `Source`. `ABSENT` where no node that answers has it now."""
        key = tenant, digest
        if self._plans.get(key) is _Plan.LOCAL:  # our own copy is wrong
            await self.board.ask(key)
        away: Refused | None = None
        until = self._clock() + LOOK_S
        while self._clock() < until:
            choice = self._look(key, into.nbytes)
            if isinstance(choice, Pause):
                await asyncio.sleep(PAUSE_S)
                continue
            peer = self.board.named(choice.node) if isinstance(choice, FromPeer) else None
            if peer is None:
                break
            try:
                outcome = await self._fetch(peer, tenant, digest, into)
            except PeerBusy:
                continue
            except Refused as refused:
                away = refused
                self.board.forget(peer)
                continue
            if outcome is Outcome.ABSENT:
                self.board.forget(peer, key)
                continue
            self._gave[key] = peer
            return outcome
        if away is not None:
            raise away
        return Outcome.ABSENT

    async def _fetch(self, peer: Peer, tenant: str, digest: str, into: memoryview) -> Outcome:
        """Measured."""
        transfer, moved = self.pace.begin(into.nbytes, self._clock()), 0
        try:
            outcome = await peer.fetch(tenant, digest, into)
            moved = 0 if outcome in NOT_THERE else into.nbytes
        finally:
            self.pace.end(transfer, moved, self._clock())
        return outcome

    async def quarantine(self, tenant: str, digest: str) -> None:
        """See `Source`: who sent it is not asked for anything for a while."""
        key = tenant, digest
        peer = self._gave.pop(key, None)
        if peer is not None:
            self._plans[key] = _Plan.HEAL
            peer.set_aside()
            self.board.forget(peer)

    def try_claim(self, key: Key, nbytes: int) -> bool:
        """Whether this node reads the chunk from the store: then others may wait for it here."""
        plan = self._plans.get(key)
        if plan in (_Plan.STORE, _Plan.PEER) and not isinstance(self._look(key, nbytes), FromStore):
            return False
        if plan is not None:
            self._claim(key, plan)
        return True

    def _look(self, key: Key, nbytes: int) -> Choice:
        now, asked_at = self._clock(), self.board.asked_at(key)
        since = self.board.since(key)
        return choose(
            self.board.node,
            key[1],
            self.board.others(key, nbytes),
            store_s=self.store_pace.alone_s(nbytes),
            peers_s=self.pace.alone_s(nbytes),
            settled=asked_at is not None and now - since > SETTLE_S,
            patient=now - max(since, self.board.moved_at) < PATIENCE_S,
        )

    def _claim(self, key: Key, plan: _Plan) -> None:
        self._plans[key] = plan
        self.board.claim(key)


@dataclass(frozen=True, slots=True)
class _Moving:
    """A turn of which the board hears part by part: others wait for a node as long as something arrives there."""

    turn: Turn
    board: Board

    async def part(self, nbytes: int) -> int:
        """See `Turn`."""
        return await self.turn.part(nbytes)

    def came(self, nbytes: int) -> None:
        """See `Turn`."""
        self.board.note_moved()
        self.turn.came(nbytes)


class SharedStore:
    """A `Source` around the store's: read by one node for all, and measured. `fetch` raises `Elsewhere`, too."""

    def __init__(self, inner: Source, peers: PeerTier, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._peers = peers
        self._clock = clock
        self.tier = inner.tier
        self.attempts = inner.attempts
        self.room = inner.room

    def __repr__(self) -> str:
        return f"<SharedStore {self._inner!r} {self._peers.store_pace!r}>"

    def may_have(self, tenant: str, digest: str) -> bool:
        """See `Source`."""
        return self._inner.may_have(tenant, digest)

    async def fetch(self, tenant: str, digest: str, into: memoryview, turn: Turn = ALL_AT_ONCE) -> Outcome:
        """See `Source`."""
        if not self._peers.try_claim((tenant, digest), into.nbytes):
            raise Elsewhere
        pace, moved = self._peers.store_pace, 0
        transfer = pace.begin(into.nbytes, self._clock())
        try:
            outcome = await self._inner.fetch(tenant, digest, into, _Moving(turn, self._peers.board))
            moved = 0 if outcome in NOT_THERE else into.nbytes
        finally:
            pace.end(transfer, moved, self._clock())
        return outcome

    async def quarantine(self, tenant: str, digest: str) -> None:
        """See `Source`."""
        await self._inner.quarantine(tenant, digest)
