"""Nodes that miss a version at once, over virtual time: the product's turns and boards, whose calls take the time that
lines and a throttled store would take.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import cast

import aiohttp
from blake3 import blake3

from contracts.errors import Refused, Unavailable
from tests.virtual_loop import run_virtually
from weightcache.peer_board import Board
from weightcache.peer_client import Peer
from weightcache.peer_tier import READS_AT_ONCE, Elsewhere, PeerTier, SharedStore
from weightcache.peer_wire import Have
from weightcache.policy.healing import Outcome
from weightcache.policy.mixing import Standing
from weightcache.policy.sharing import Limit
from weightcache.sources import ALL_AT_ONCE, Source, Turn

TENANT = "acme"
CHUNK = 1000
LATENCY_S = 0.001
LINE = 100 * CHUNK  # bytes a second, of each node
THROTTLE = 20 * CHUNK  # of the store, for all nodes together
PARTS = 10
STORE_READS = 6
COUNT = 64
DIGESTS = [blake3(number.to_bytes(4, "big")).hexdigest() for number in range(COUNT)]


class Line:
    """One transfer after the other, at its rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    async def move(self, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + nbytes / self.rate
        await asyncio.sleep(self._free_at - now)


class Store:
    """Counts its reads."""

    def __init__(self, rate: float = THROTTLE) -> None:
        self.line = Line(rate)
        self.reads: Counter[str] = Counter()

    async def read(self, digest: str) -> AsyncIterator[int]:
        """In parts that others' go between."""
        self.reads[digest] += 1
        for _ in range(PARTS):
            await self.line.move(CHUNK // PARTS)
            yield CHUNK // PARTS


class Wire(Peer):
    """A peer whose calls go straight to the other node's board and line."""

    def __init__(self, target: "Node") -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(target.name, cast(aiohttp.ClientSession, None), self._loop.time)
        self.target = target

    async def have(self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float) -> list[Standing] | None:
        await asyncio.sleep(LATENCY_S)
        if self.target.dead:
            self._fail(OSError("dead"))
            return None
        found = await self.target.board.answer(tenant, Have(digests=tuple(digests), node=node, wait_s=wait_s))
        self.node = found.node
        if found.moved != self._moved:
            self._moved, self.moved_at = found.moved, self._loop.time()
        return [Standing(letter) for letter in found.standings]

    async def fetch(self, tenant: str, digest: str, into: memoryview) -> Outcome:
        transfer = self.pace.begin(into.nbytes, self._loop.time())
        moved = 0
        try:
            await asyncio.sleep(LATENCY_S)
            if not self.target.dead and digest not in self.target.here:
                return Outcome.ABSENT
            await self.target.line.move(into.nbytes)
            if self.target.dead:
                self._fail(OSError("dead"))
                raise Refused(Unavailable("a peer"))
            moved = into.nbytes
            return Outcome.WHOLE
        finally:
            self.pace.end(transfer, moved, self._loop.time())


class SimStore:
    """A node's way to the store, as a `Source`."""

    tier = "store"
    attempts = 2
    room = Limit(STORE_READS)

    def __init__(self, store: Store) -> None:
        self.store = store
        self.tells = True  # when a part came

    def may_have(self, tenant: str, digest: str) -> bool:
        return True

    async def fetch(self, tenant: str, digest: str, into: memoryview, turn: Turn = ALL_AT_ONCE) -> Outcome:
        async for nbytes in self.store.read(digest):
            if self.tells:
                turn.came(nbytes)
        return Outcome.WHOLE

    async def quarantine(self, tenant: str, digest: str) -> None:
        """Nothing is wrong here."""


class Node:
    """Loads chunks as the fetcher does: it decides, asks the peer tier in turn, then the store in turn."""

    def __init__(self, name: str, store: Store) -> None:
        clock = asyncio.get_running_loop().time
        self.name = name
        self.source = SimStore(store)
        self.line = Line(LINE)
        self.here: set[str] = set()
        self.dead = False
        self.board = Board(name, (), lambda _, digest: digest in self.here, clock, serves=True)
        self.tier = PeerTier(self.board, lambda _, digest: digest in self.here, clock)
        self.store = SharedStore(self.source, self.tier, clock)
        self.places = {"peer": asyncio.Semaphore(READS_AT_ONCE), "store": asyncio.Semaphore(STORE_READS)}
        self.from_peers = 0

    async def load(self, digests: Sequence[str]) -> None:
        await asyncio.gather(*(self._load(digest) for digest in digests))

    async def _load(self, digest: str) -> None:
        into = memoryview(bytearray(CHUNK))
        with self.tier.loading((TENANT, digest)):
            while digest not in self.here and not self.dead:
                await self.tier.decide((TENANT, digest), CHUNK, lambda: not self.dead)
                sources: tuple[Source, ...] = (self.tier, self.store)
                for source in sources:
                    if not source.may_have(TENANT, digest):
                        continue
                    with suppress(Refused, Elsewhere):
                        async with self.places[source.tier]:
                            outcome = await source.fetch(TENANT, digest, into)
                        if outcome is Outcome.WHOLE and not self.dead:
                            self.here.add(digest)
                            self.from_peers += source is self.tier
                            break


Story = Callable[[list[Node], Store], Awaitable[None]]


def play(story: Story, count: int = 8, rate: float = THROTTLE) -> tuple[list[Node], Store, float]:
    """The nodes, the store and the time at the story's end."""

    async def main() -> tuple[list[Node], Store, float]:
        store = Store(rate)
        nodes = [Node(f"node{number}", store) for number in range(count)]
        for node in nodes:
            node.board.peers = [Wire(other) for other in nodes if other is not node]
        await story(nodes, store)
        took_s = asyncio.get_running_loop().time()
        for node in nodes:
            await node.board.close()
        return nodes, store, took_s

    return run_virtually(main())


def assert_all_here(nodes: Sequence[Node]) -> None:
    assert all(node.here == set(DIGESTS) for node in nodes)
