"""The other nodes, and their states of the chunks that this node is loading.

Each node is queried once, for all chunks that are wanted at the same moment. The query also says that this node wants
them. A chunk is forgotten when its load has ended.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from kelvin.blobstore.bounded_gather import cancel_and_wait
from weightcache.peers.ownership_policy import ChunkState, choose
from weightcache.peers.peer_client import Peer
from weightcache.peers.peer_protocol import MAX_DIGESTS, ChunkQuery, ChunkStates

WAIT_S: Final = 2.0  # longest wait of one query to an owner; then the chunk queues for another one
PAUSE_S: Final = 0.1  # pause after a query that an owner answered without waiting
STALL_S: Final = 10.0  # an owner is given up after so long without bytes at that owner,
PATIENCE_S: Final = 30.0  # or after so long without bytes at this node

Key = tuple[str, str]  # tenant, digest


@dataclass(slots=True)
class _Chunk:
    """A chunk that is loading."""

    since: float
    users: int = 0
    question: asyncio.Task[None] | None = None  # the query to the other nodes
    claimed: bool = False
    is_forced_owner: bool = False  # regardless of other nodes' states
    peer_states: dict[Peer, ChunkState] = field(default_factory=dict)


class PeerGroup:
    """The group of nodes; `node` is our name. `serves`: others may read what we load. `is_here` checks our tiers."""

    def __init__(
        self, node: str, peers: Sequence[Peer], is_here: Callable[[str, str], bool], clock: Callable[[], float], *,
        serves: bool,
    ) -> None:  # fmt: skip
        self.node = node
        self.peers = list(peers)
        self._moved = 0  # counts ended loads and arrived parts of chunks
        self._moved_at = clock()  # time of the last one
        self._is_here = is_here
        self._clock = clock
        self._advertised_name = node if serves else None
        self._chunks: dict[Key, _Chunk] = {}
        # By tenant, the query that is about to be sent
        self._next: dict[str, tuple[list[str], asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PeerGroup {self.node} loading={len(self._chunks)} peers={len(self.peers)}>"

    async def close(self) -> None:
        """Cancel the running queries."""
        await cancel_and_wait(tuple(self._tasks))

    @contextmanager
    def loading(self, key: Key) -> Iterator[None]:
        """Mark the chunk as wanted while the block runs. It may be wanted twice: for memory and for the disk."""
        chunk = self._chunks.setdefault(key, _Chunk(self._clock()))
        chunk.users += 1
        try:
            yield
        finally:
            chunk.users -= 1
            if not chunk.users:
                del self._chunks[key]
            self.note_moved()
            self._changed.set()
            self._changed = asyncio.Event()

    def note_moved(self) -> None:
        """Record that bytes arrived here, so this node and the nodes that wait for it keep waiting."""
        self._moved += 1
        self._moved_at = self._clock()

    def was_asked(self, key: Key) -> bool:
        """Return whether the other nodes were queried about the chunk."""
        question = self._chunks[key].question
        return question is not None and question.done()

    async def ask(self, key: Key) -> None:
        """Query the other nodes about the chunk, once, together with all chunks that are wanted at this moment."""
        chunk = self._chunks[key]
        if chunk.question is None:
            tenant, digest = key
            if tenant not in self._next:
                digests: list[str] = []
                task = asyncio.create_task(self._ask_all(tenant, digests))
                self._next[tenant] = digests, task
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            asked, chunk.question = self._next[tenant]
            asked.append(digest)
        await asyncio.shield(chunk.question)

    def choose(self, key: Key) -> tuple[Peer, ChunkState] | None:
        """Return the peer that has or will have the chunk, and its state; None: this node must read the store. A node
        that has claimed the chunk never waits for others, even after its read failed, because others wait for it.
        """
        chunk = self._chunks[key]
        peer_states = {
            peer: says for peer, says in chunk.peer_states.items() if says is ChunkState.READY or not chunk.claimed
        }
        known = {peer.node: peer for peer in peer_states if peer.answers and peer.node is not None}
        others = {node: peer_states[peer] for node, peer in known.items()}
        node = choose(self.node, key[1], others, [node for node, peer in known.items() if peer.is_busy])
        return None if node is None else (known[node], others[node])

    def claim(self, key: Key) -> bool:
        """Return whether this node must read the chunk from the store. If so, other nodes wait for it from now on."""
        chunk = self._chunks[key]
        if not chunk.claimed:
            chunk.claimed = chunk.is_forced_owner or (self.was_asked(key) and self.choose(key) is None)
        return chunk.claimed

    def take_ownership(self, key: Key) -> None:
        """Let this node read the chunk from the store, regardless of other nodes: a copy of it was wrong, or it is on
        this node's disk, so that no peer was queried.
        """
        self._chunks[key].is_forced_owner = True

    def forget(self, peer: Peer, key: Key | None = None) -> None:
        """Forget the peer's state of the chunk; of all chunks if `key` is None."""
        for each in list(self._chunks) if key is None else [key]:
            if (chunk := self._chunks.get(each)) is not None:
                chunk.peer_states.pop(peer, None)

    async def wait(self, key: Key, owner: Peer) -> None:
        """Wait until the owner has the chunk or will not have it, or for WAIT_S. If the owner does not answer, or no
        bytes arrive there or here for too long, its chunks are no longer waited for.
        """
        tenant, digest = key
        chunk, began = self._chunks[key], self._clock()
        await self._ask_one(owner, tenant, [digest], WAIT_S)
        now = self._clock()
        if now - max(chunk.since, owner.moved_at) > STALL_S or now - max(chunk.since, self._moved_at) > PATIENCE_S:
            self.forget(owner)
        elif chunk.peer_states.get(owner) in (ChunkState.CLAIMED, ChunkState.WANTED) and now - began < WAIT_S / 2:
            await asyncio.sleep(PAUSE_S)

    async def answer(self, tenant: str, question: ChunkQuery) -> ChunkStates:
        """Answer another node's query. With a wait, answer once one of the chunks is here, or will not be."""
        if question.node is not None:
            self._note_peer_wants(question.node, tenant, question.digests)
        until = self._clock() + question.wait_s
        while True:
            standings = [self._standing(tenant, digest) for digest in question.digests]
            left = until - self._clock()
            if left <= 0 or ChunkState.READY in standings or ChunkState.ABSENT in standings:
                return ChunkStates(node=self.node, standings="".join(standings), moved=self._moved)
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _standing(self, tenant: str, digest: str) -> ChunkState:
        if self._is_here(tenant, digest):
            return ChunkState.READY
        chunk = self._chunks.get((tenant, digest))
        if chunk is None:
            return ChunkState.ABSENT
        return ChunkState.CLAIMED if chunk.claimed else ChunkState.WANTED

    def _note_peer_wants(self, node: str, tenant: str, digests: Sequence[str]) -> None:
        """Record that another node wants these chunks."""
        peer = next((each for each in self.peers if each.node == node), None)
        for digest in digests:
            chunk = self._chunks.get((tenant, digest))
            if chunk is None:
                continue
            if peer is None:
                chunk.question = None  # an unknown node: it did not answer before, or has restarted
            elif chunk.peer_states.get(peer, ChunkState.ABSENT) is ChunkState.ABSENT:
                chunk.peer_states[peer] = ChunkState.WANTED

    async def _ask_all(self, tenant: str, asked: list[str]) -> None:
        await asyncio.sleep(0)  # let all tasks of this loop iteration add their chunks
        del self._next[tenant]
        for at in range(0, len(asked), MAX_DIGESTS):
            digests = asked[at : at + MAX_DIGESTS]
            await asyncio.gather(*(self._ask_one(peer, tenant, digests) for peer in self.peers if peer.answers))

    async def _ask_one(self, peer: Peer, tenant: str, digests: Sequence[str], wait_s: float = 0.0) -> None:
        """Query one peer and store its answer. If it doesn't answer, forget all its states."""
        standings = await peer.query_chunks(tenant, digests, None if wait_s else self._advertised_name, wait_s)
        if standings is None:
            self.forget(peer)
        elif peer.node == self.node:  # all nodes may have the same list of peers
            self.peers = [each for each in self.peers if each is not peer]
        else:
            for digest, standing in zip(digests, standings, strict=True):
                if (chunk := self._chunks.get((tenant, digest))) is not None:
                    chunk.peer_states[peer] = standing
