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
from weightcache.peers.ownership_policy import ChunkState, choose_node
from weightcache.peers.peer_client import Peer
from weightcache.peers.peer_protocol import MAX_DIGESTS, ChunkQuery, ChunkStates
from weightcache.sources.policy.fair_read_queue import ChunkKey

WAIT_S: Final = 2.0  # longest wait of one query to an owner; then the chunk queues for another one
REQUERY_PAUSE_S: Final = 0.1  # pause after a query that an owner answered without waiting
OWNER_STALL_S: Final = 10.0  # an owner is given up after so long without bytes at that owner,
OWN_STALL_S: Final = 30.0  # or after so long without bytes at this node


@dataclass(slots=True)
class _WantedChunk:
    """A chunk that is loading."""

    wanted_at_s: float
    load_count: int = 0
    query: asyncio.Task[None] | None = None  # the query to the other nodes
    is_claimed: bool = False
    is_forced_owner: bool = False  # regardless of other nodes' states
    peer_states: dict[Peer, ChunkState] = field(default_factory=dict)


class PeerGroup:
    """The group of nodes; `node` is our name. `is_serving`: others may read what we load. `is_local`
    checks our tiers.
    """

    def __init__(
        self, node: str, peers: Sequence[Peer], is_local: Callable[[str, str], bool], clock: Callable[[], float], *,
        is_serving: bool,
    ) -> None:  # fmt: skip
        self.node = node
        self.peers = list(peers)
        self._progress_count = 0  # counts ended loads and arrived parts of chunks
        self._progress_at_s = clock()  # time of the last one
        self._is_local = is_local
        self._clock = clock
        self._advertised_name = node if is_serving else None
        self._chunks: dict[ChunkKey, _WantedChunk] = {}
        # By tenant, the query that is about to be sent
        self._next_queries: dict[str, tuple[list[str], asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PeerGroup {self.node} loading={len(self._chunks)} peers={len(self.peers)}>"

    async def close(self) -> None:
        """Cancel the running queries."""
        await cancel_and_wait(tuple(self._tasks))

    @contextmanager
    def mark_wanted(self, key: ChunkKey) -> Iterator[None]:
        """Mark the chunk as wanted while the block runs. It may be wanted twice: for memory and for the disk."""
        chunk = self._chunks.setdefault(key, _WantedChunk(self._clock()))
        chunk.load_count += 1
        try:
            yield
        finally:
            chunk.load_count -= 1
            if not chunk.load_count:
                del self._chunks[key]
            self.record_progress()
            self._changed.set()
            self._changed = asyncio.Event()

    def record_progress(self) -> None:
        """Record that bytes arrived here, so this node and the nodes that wait for it keep waiting."""
        self._progress_count += 1
        self._progress_at_s = self._clock()

    def was_queried(self, key: ChunkKey) -> bool:
        """Return whether the other nodes were queried about the chunk."""
        query = self._chunks[key].query
        return query is not None and query.done()

    async def query_peers(self, key: ChunkKey) -> None:
        """Query the other nodes about the chunk, once, together with all chunks that are wanted at this moment."""
        chunk = self._chunks[key]
        if chunk.query is None:
            tenant, digest = key
            if tenant not in self._next_queries:
                digests: list[str] = []
                task = asyncio.create_task(self._query_all(tenant, digests))
                self._next_queries[tenant] = digests, task
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            next_digests, chunk.query = self._next_queries[tenant]
            next_digests.append(digest)
        await asyncio.shield(chunk.query)

    def choose_peer(self, key: ChunkKey) -> tuple[Peer, ChunkState] | None:
        """Return the peer that has or will have the chunk, and its state; None: this node must read the store. A node
        that has claimed the chunk never waits for others, even after its read failed, because others wait for it.
        """
        chunk = self._chunks[key]
        peer_states = {
            peer: state
            for peer, state in chunk.peer_states.items()
            if state is ChunkState.READY or not chunk.is_claimed
        }
        known = {peer.node: peer for peer in peer_states if peer.is_available and peer.node is not None}
        state_by_node = {node: peer_states[peer] for node, peer in known.items()}
        node = choose_node(self.node, key[1], state_by_node, [node for node, peer in known.items() if peer.is_busy])
        return None if node is None else (known[node], state_by_node[node])

    def try_claim(self, key: ChunkKey) -> bool:
        """Return whether this node must read the chunk from the store. If so, other nodes wait for it from now on."""
        chunk = self._chunks[key]
        if not chunk.is_claimed:
            chunk.is_claimed = chunk.is_forced_owner or (self.was_queried(key) and self.choose_peer(key) is None)
        return chunk.is_claimed

    def force_ownership(self, key: ChunkKey) -> None:
        """Let this node read the chunk from the store, regardless of other nodes: a copy of it was wrong, or it is on
        this node's disk, so that no peer was queried.
        """
        self._chunks[key].is_forced_owner = True

    def forget_states(self, peer: Peer, key: ChunkKey | None = None) -> None:
        """Forget the peer's state of the chunk; of all chunks if `key` is None."""
        for chunk_key in list(self._chunks) if key is None else [key]:
            if (chunk := self._chunks.get(chunk_key)) is not None:
                chunk.peer_states.pop(peer, None)

    async def wait_for_owner(self, key: ChunkKey, owner: Peer) -> None:
        """Wait until the owner has the chunk or will not have it, or for WAIT_S. If the owner does not answer, or no
        bytes arrive there or here for too long, its chunks are no longer waited for.
        """
        tenant, digest = key
        chunk, began_s = self._chunks[key], self._clock()
        await self._query_peer(owner, tenant, [digest], WAIT_S)
        now_s = self._clock()
        owner_stall_s = now_s - max(chunk.wanted_at_s, owner.progress_at_s)
        own_stall_s = now_s - max(chunk.wanted_at_s, self._progress_at_s)
        if owner_stall_s > OWNER_STALL_S or own_stall_s > OWN_STALL_S:
            self.forget_states(owner)
        elif chunk.peer_states.get(owner) in (ChunkState.CLAIMED, ChunkState.WANTED) and now_s - began_s < WAIT_S / 2:
            await asyncio.sleep(REQUERY_PAUSE_S)

    async def answer_query(self, tenant: str, query: ChunkQuery) -> ChunkStates:
        """Answer another node's query. With a wait, answer once one of the chunks is here, or will not be."""
        if query.node is not None:
            self._note_peer_wants(query.node, tenant, query.digests)
        deadline_s = self._clock() + query.wait_s
        while True:
            states = [self._own_state(tenant, digest) for digest in query.digests]
            left_s = deadline_s - self._clock()
            if left_s <= 0 or ChunkState.READY in states or ChunkState.ABSENT in states:
                return ChunkStates(node=self.node, standings="".join(states), moved=self._progress_count)
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def _own_state(self, tenant: str, digest: str) -> ChunkState:
        if self._is_local(tenant, digest):
            return ChunkState.READY
        chunk = self._chunks.get((tenant, digest))
        if chunk is None:
            return ChunkState.ABSENT
        return ChunkState.CLAIMED if chunk.is_claimed else ChunkState.WANTED

    def _note_peer_wants(self, node: str, tenant: str, digests: Sequence[str]) -> None:
        """Record that another node wants these chunks."""
        peer = next((each for each in self.peers if each.node == node), None)
        for digest in digests:
            chunk = self._chunks.get((tenant, digest))
            if chunk is None:
                continue
            if peer is None:
                chunk.query = None  # an unknown node: it did not answer before, or has restarted
            elif chunk.peer_states.get(peer, ChunkState.ABSENT) is ChunkState.ABSENT:
                chunk.peer_states[peer] = ChunkState.WANTED

    async def _query_all(self, tenant: str, digests_to_query: list[str]) -> None:
        await asyncio.sleep(0)  # let all tasks of this loop iteration add their chunks
        del self._next_queries[tenant]
        for begin in range(0, len(digests_to_query), MAX_DIGESTS):
            digests = digests_to_query[begin : begin + MAX_DIGESTS]
            await asyncio.gather(*(self._query_peer(peer, tenant, digests) for peer in self.peers if peer.is_available))

    async def _query_peer(self, peer: Peer, tenant: str, digests: Sequence[str], wait_s: float = 0.0) -> None:
        """Query one peer and store its answer. If it doesn't answer, forget all its states."""
        states = await peer.query_chunks(tenant, digests, None if wait_s else self._advertised_name, wait_s)
        if states is None:
            self.forget_states(peer)
        elif peer.node == self.node:  # all nodes may have the same list of peers
            self.peers = [each for each in self.peers if each is not peer]
        else:
            for digest, state in zip(digests, states, strict=True):
                if (chunk := self._chunks.get((tenant, digest))) is not None:
                    chunk.peer_states[peer] = state
