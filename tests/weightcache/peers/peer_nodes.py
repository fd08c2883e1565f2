"""Nodes that miss a version at once: the product's fetchers and peer groups over simulated links, on virtual time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import cast

import aiohttp
from blake3 import blake3

from kelvin.contracts.errors import Refused, Unavailable
from tests.virtual_loop import run_virtually
from weightcache.counters import Counters
from weightcache.fetch.fetcher import Fetcher
from weightcache.peers.ownership_policy import ChunkState
from weightcache.peers.peer_client import Peer
from weightcache.peers.peer_group import PeerGroup
from weightcache.peers.peer_protocol import ChunkQuery
from weightcache.peers.peer_tier import PeerTier, SharedStore
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit, positions_by_chunk
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.source import UNLIMITED_READ_SLOT, ReadSlot
from weightcache.sources.verifier import Verifier

TENANT = "acme"
CHUNK = 1000
LATENCY_S = 0.001
LINE = 100 * CHUNK  # bytes a second, of each node's link
THROTTLE = 20 * CHUNK  # bytes a second, of the store for all nodes together
PARTS = 10
STORE_READS = 6
COUNT = 64
DIGESTS = [blake3(number.to_bytes(4, "big")).hexdigest() for number in range(COUNT)]


class Line:
    """A link that carries one transfer after another at its rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    async def move(self, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + nbytes / self.rate
        await asyncio.sleep(self._free_at - now)


class Store:
    """A throttled store that counts reads by chunk."""

    def __init__(self, rate: float = THROTTLE) -> None:
        self.line = Line(rate)
        self.reads: Counter[str] = Counter()

    async def read(self, digest: str) -> AsyncIterator[int]:
        """Yield the chunk in parts, between which other reads proceed."""
        self.reads[digest] += 1
        for _ in range(PARTS):
            await self.line.move(CHUNK // PARTS)
            yield CHUNK // PARTS


class Wire(Peer):
    """A peer whose calls go directly to the other node's group and link."""

    def __init__(self, target: "Node") -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(target.name, cast(aiohttp.ClientSession, None), self._loop.time)
        self.target = target

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        await asyncio.sleep(LATENCY_S)
        if not self.target.dead:
            query = ChunkQuery(digests=tuple(digests), node=node, wait_s=wait_s)
            found = await self.target.group.answer_query(tenant, query)
            self.node = found.node
            if found.moved != self._progress_count:
                self._progress_count, self.progress_at_s = found.moved, self._loop.time()
        if self.target.dead:
            self._record_failure(OSError("dead"))
            return None
        return [ChunkState(letter) for letter in found.standings]

    async def fetch(self, tenant: str, digest: str, into: memoryview) -> ReadOutcome:
        await asyncio.sleep(LATENCY_S)
        if not self.target.dead and digest not in self.target.here:
            return ReadOutcome.ABSENT
        await self.target.line.move(into.nbytes)
        if self.target.dead:
            self._record_failure(OSError("dead"))
            raise Refused(Unavailable("a peer"))
        return ReadOutcome.WHOLE


class SimStore:
    """A node's reads from the store, as a `Source`."""

    tier = "store"
    attempts = 2
    read_limit = ChunkCountLimit(STORE_READS)

    def __init__(self, store: Store) -> None:
        self.store = store
        self.tells = True  # whether it reports the arrival of each part

    def may_have(self, tenant: str, digest: str) -> bool:
        return True

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, slot: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        async for nbytes in self.store.read(digest):
            if self.tells:
                slot.record_arrival(nbytes)
        return ReadOutcome.WHOLE

    async def quarantine(self, tenant: str, digest: str) -> None:
        """Do nothing: no copy is wrong here."""


class Trusting(Verifier):
    """A verifier that accepts all bytes without hashing them."""

    def __init__(self) -> None:
        super().__init__(cast(Executor, None), lambda *_: True, Counters())

    async def matches_digest(self, data: memoryview, digest: str) -> bool:
        return True


class Node:
    """A node that loads chunks with the product's fetcher, from its peers and the store."""

    def __init__(self, name: str, store: Store) -> None:
        clock = asyncio.get_running_loop().time
        self.name = name
        self.source = SimStore(store)
        self.line = Line(LINE)
        self.here: set[str] = set()
        self.dead = False
        self.group = PeerGroup(name, (), lambda _, digest: digest in self.here, clock, is_serving=True)
        self.tier = PeerTier(self.group, lambda *_: False)
        self.from_peers = 0
        self._loads: set[asyncio.Task[None]] = set()
        self.meet(())

    def meet(self, peers: Sequence[Peer]) -> None:
        """Set the node's peers, before its first load."""
        self.group.peers = list(peers)
        sources = self.tier, SharedStore(self.source, self.group)
        self.fetcher = Fetcher(sources, Trusting(), Counters(), self.tier)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is loading, queued or waited for."""
        scheduler = self.fetcher.scheduler
        under_way = [*scheduler.running.values(), *scheduler.queued.values(), len(self._loads)]
        return not any(under_way) and "loading=0" in repr(self.group)

    async def load(self, digests: Sequence[str]) -> None:
        """Load these chunks. Returns early if the node dies."""
        flow = object()
        missing = [digest for digest in digests if digest not in self.here]
        self.fetcher.scheduler.enter(flow, positions_by_chunk(missing, TENANT))
        loads = {asyncio.create_task(self._load(digest)) for digest in missing}
        self._loads |= loads
        try:
            await asyncio.gather(*loads)
        except asyncio.CancelledError:
            if not self.dead:
                raise
        finally:
            self.fetcher.scheduler.leave(flow)
            self._loads -= loads

    def die(self) -> None:
        """Stop answering calls and cancel all loads."""
        self.dead = True
        for load in self._loads:
            load.cancel()

    async def _load(self, digest: str) -> None:
        tier = await self.fetcher.fetch(TENANT, digest, memoryview(bytearray(CHUNK)))
        self.here.add(digest)
        self.from_peers += tier == self.tier.tier


Story = Callable[[list[Node], Store], Awaitable[None]]


def play(story: Story, count: int = 8, rate: float = THROTTLE) -> tuple[list[Node], Store, float]:
    """Run the scenario. Return the nodes, the store and the virtual seconds that it took."""

    async def main() -> tuple[list[Node], Store, float]:
        store = Store(rate)
        nodes = [Node(f"node{number}", store) for number in range(count)]
        for node in nodes:
            node.meet([Wire(other) for other in nodes if other is not node])
        await story(nodes, store)
        took_s = asyncio.get_running_loop().time()
        for node in nodes:
            await node.group.close()
        return nodes, store, took_s

    return run_virtually(main())


def assert_all_here(nodes: Sequence[Node]) -> None:
    assert all(node.here == set(DIGESTS) for node in nodes)
