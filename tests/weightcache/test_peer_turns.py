"""Eight nodes that miss a version at once, over virtual time: the product's turns and boards, whose calls take the time
that lines and a throttled store would take.
"""

import asyncio
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import aiohttp
import pytest
from blake3 import blake3

from contracts.errors import Refused, Unavailable
from weightcache import peer_tier
from weightcache.peer_board import Board
from weightcache.peer_client import Peer
from weightcache.peer_tier import Elsewhere, PeerTier, SharedStore
from weightcache.peer_wire import Have
from weightcache.policy.healing import Outcome
from weightcache.policy.mixing import Choice, FromPeer, FromStore, Other, Standing
from weightcache.policy.sharing import Limit
from weightcache.sources import Source

T = TypeVar("T")
TENANT = "acme"
CHUNK = 1000
LATENCY_S = 0.001
LINE = 100 * CHUNK  # bytes a second, of each node
THROTTLE = 20 * CHUNK  # of the store, for all nodes together
COUNT = 64
DIGESTS = [blake3(number.to_bytes(4, "big")).hexdigest() for number in range(COUNT)]


class _Jumping(selectors.DefaultSelector):
    """Where nothing is ready time goes on to what is due next."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.now += timeout
        assert timeout is not None, "all wait for one another"
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Jumping()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


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

    async def read(self, digest: str) -> None:
        self.reads[digest] += 1
        await self.line.move(CHUNK)


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
        self.pace.begin(into.nbytes, self._loop.time())
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
            self.pace.end(into.nbytes, moved, self._loop.time())


class SimStore:
    """A node's way to the store, as a `Source`."""

    tier = "store"
    attempts = 2
    limit = Limit(6)

    def __init__(self, store: Store) -> None:
        self.store = store

    def may_have(self, tenant: str, digest: str) -> bool:
        return True

    async def fetch(self, tenant: str, digest: str, into: memoryview) -> Outcome:
        await self.store.read(digest)
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
        self.places = {each.tier: asyncio.Semaphore(each.limit.at_once) for each in (self.tier, self.store)}
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

    return run(main())


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


async def all_at_once(nodes: list[Node], store: Store) -> None:
    await asyncio.gather(*(node.load(DIGESTS) for node in nodes))


def later(*begins_s: float) -> Story:
    """Each node begins at its time."""

    async def story(nodes: list[Node], store: Store) -> None:
        async def begin(node: Node, at_s: float) -> None:
            await asyncio.sleep(at_s)
            await node.load(DIGESTS)

        await asyncio.gather(*(begin(node, at_s) for node, at_s in zip(nodes, begins_s, strict=True)))

    return story


def assert_all_here(nodes: Sequence[Node]) -> None:
    assert all(node.here == set(DIGESTS) for node in nodes)


def test_all_at_once() -> None:
    """Each chunk leaves the store once, and all have all in little more than the store takes for one."""
    nodes, store, took_s = play(all_at_once)
    assert_all_here(nodes)
    assert store.reads == Counter(dict.fromkeys(DIGESTS, 1))
    assert took_s < 1.5 * COUNT * CHUNK / THROTTLE
    read = [COUNT - node.from_peers for node in nodes]
    assert min(read) > 0, "each has read a part"


@pytest.mark.parametrize(
    "begins_s",
    [
        pytest.param((0, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007), id="milliseconds apart"),
        pytest.param((0, 0.03, 0.06, 0.09, 0.12, 0.15, 0.18, 0.21), id="within the moment of settling"),
        pytest.param((0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.8), id="while the first are loading"),
        pytest.param((0, 60, 61, 62, 63, 64, 65, 66), id="when the first has all"),
    ],
)
def test_one_after_another(begins_s: tuple[float, ...]) -> None:
    """Whenever they begin, hardly a chunk leaves the store twice."""
    nodes, store, _ = play(later(*begins_s))
    assert_all_here(nodes)
    assert store.reads.total() <= 1.1 * COUNT


def test_alone() -> None:
    """A node whose peers want nothing reads all of it, and loses no more than the moment of settling."""
    nodes, store, took_s = play(_first_alone)
    assert nodes[0].here == set(DIGESTS)
    assert store.reads.total() == COUNT
    assert took_s < COUNT * CHUNK / THROTTLE + 0.2


async def _first_alone(nodes: list[Node], store: Store) -> None:
    await nodes[0].load(DIGESTS)


def test_one_dies() -> None:
    """What it was reading for the others is read by another one; all that live have all."""

    async def story(nodes: list[Node], store: Store) -> None:
        async def die() -> None:
            await asyncio.sleep(2.0)
            nodes[3].dead = True

        await asyncio.gather(all_at_once(nodes, store), die())

    nodes, store, took_s = play(story)
    assert_all_here([node for node in nodes if not node.dead])
    assert store.reads.total() <= 1.5 * COUNT
    assert took_s < 3 * COUNT * CHUNK / THROTTLE


def test_one_stands_still() -> None:
    """A node that answers, but gets nowhere, is not waited for without end."""

    async def story(nodes: list[Node], store: Store) -> None:
        nodes[0].source.store = Store(rate=1e-3)
        stuck = asyncio.create_task(nodes[0].load(DIGESTS))
        await asyncio.gather(*(node.load(DIGESTS) for node in nodes[1:]))
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)

    nodes, store, took_s = play(story)
    assert_all_here(nodes[1:])
    assert took_s < 60
    assert store.reads.total() <= 2 * COUNT


def test_a_far_quicker_store_is_used() -> None:
    """Beside a peer whose line is all but cut most is read again; not beside one that is merely slower."""

    def second(line: float) -> Story:
        async def story(nodes: list[Node], store: Store) -> None:
            await nodes[0].load(DIGESTS)
            nodes[0].line.rate = line
            await nodes[1].load(DIGESTS)

        return story

    nodes, store, _ = play(second(THROTTLE / 2), count=2)
    assert_all_here(nodes)
    assert store.reads.total() == COUNT
    nodes, store, took_s = play(second(CHUNK), count=2)
    assert_all_here(nodes)
    assert store.reads.total() > 1.5 * COUNT
    assert took_s < 60


def test_who_leaves_leaves_nothing() -> None:
    """A load that is cancelled in any of its waits is forgotten: nothing is wanted, claimed or watched any more."""

    async def story(nodes: list[Node], store: Store) -> None:
        for seconds in (0.0005, 0.0015, 0.02, 0.2, 1.0):
            loads = asyncio.gather(*(node.load(DIGESTS) for node in nodes))
            await asyncio.sleep(seconds)
            loads.cancel()
            await asyncio.gather(loads, return_exceptions=True)
            await asyncio.sleep(5.0)
            for node in nodes:
                assert not node.board._chunks
                assert not node.board._watched
                assert not node.tier._plans
                assert not node.board._tasks
                assert not any(places.locked() for places in node.places.values())
        await all_at_once(nodes, store)

    nodes, _, _ = play(story, count=3)
    assert_all_here(nodes)


def _without_turns(
    me: str, digest: str, others: Sequence[Other], *, store_s: float | None, settled: bool, patient: bool
) -> Choice:
    ready = [other for other in others if other.standing is Standing.READY]
    return FromPeer(ready[0].node) if ready else FromStore()


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without turns chunks leave the store several times, and it takes as much longer."""
    monkeypatch.setattr(peer_tier, "choose", _without_turns)
    nodes, store, took_s = play(all_at_once)
    assert_all_here(nodes)
    assert store.reads.total() > 2 * COUNT
    assert took_s > 2 * COUNT * CHUNK / THROTTLE
