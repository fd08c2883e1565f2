"""Eight nodes that miss a version at once: who reads which chunk from the store, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from tests.weightcache.peers.peer_nodes import (
    CHUNK,
    COUNT,
    DIGESTS,
    TENANT,
    THROTTLE,
    Node,
    Store,
    Story,
    Wire,
    assert_all_here,
    play,
)
from weightcache.peers import peer_group
from weightcache.peers.ownership_policy import ChunkState, rank
from weightcache.peers.peer_group import PATIENCE_S, STALL_S, WAIT_S
from weightcache.peers.peer_protocol import ChunkQuery

SLOW_LINE = 6 * CHUNK


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
        pytest.param((0, 0.03, 0.06, 0.09, 0.12, 0.15, 0.18, 0.21), id="tens of milliseconds apart"),
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
    """A node whose peers want nothing reads all of it, and loses no more than the time of one question."""
    nodes, store, took_s = play(_first_alone)
    assert nodes[0].here == set(DIGESTS)
    assert store.reads.total() == COUNT
    assert took_s < COUNT * CHUNK / THROTTLE + 0.2


async def _first_alone(nodes: list[Node], store: Store) -> None:
    await nodes[0].load(DIGESTS)


def test_dead_owner_is_replaced() -> None:
    """What it was reading for the others is read by another one; all that live have all."""

    async def story(nodes: list[Node], store: Store) -> None:
        async def die() -> None:
            await asyncio.sleep(2.0)
            nodes[3].die()

        await asyncio.gather(all_at_once(nodes, store), die())

    nodes, store, took_s = play(story)
    assert_all_here([node for node in nodes if not node.dead])
    assert store.reads.total() <= 1.5 * COUNT
    assert took_s < 3 * COUNT * CHUNK / THROTTLE


def test_stalled_owner_is_not_waited_for() -> None:
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


async def over_slow_lines(nodes: list[Node], store: Store) -> None:
    """Such that chunks queue at the nodes that have them, while hardly anything is asked of the store."""
    for node in nodes:
        node.line.rate = SLOW_LINE
    await all_at_once(nodes, store)


def test_queues_between_nodes_are_no_reason_to_turn_to_the_store() -> None:
    """Each chunk leaves the store about once, though it would send the next one sooner than any node."""
    nodes, store, _ = play(over_slow_lines)
    assert_all_here(nodes)
    assert store.reads.total() <= 1.1 * COUNT


@pytest.mark.parametrize("tells", [True, False], ids=["part by part", "control: at the end alone"])
def test_a_chunk_that_takes_long(tells: bool) -> None:
    """Whose chunks come in parts is waited for as long as they come, however long a whole one takes."""

    async def story(nodes: list[Node], store: Store) -> None:
        for node in nodes:
            node.source.tells = tells
        await all_at_once(nodes, store)

    nodes, store, _ = play(story, count=2, rate=CHUNK / 5)  # of twelve under way each takes a minute
    assert_all_here(nodes)
    assert (store.reads.total() == COUNT) == tells


def test_cancelled_load_leaves_no_claim() -> None:
    """A load that is cancelled in any of its waits is forgotten: nothing is wanted, claimed or watched any more."""

    async def story(nodes: list[Node], store: Store) -> None:
        for seconds in (0.0005, 0.0015, 0.02, 0.2, 1.0):
            loads = asyncio.gather(*(node.load(DIGESTS) for node in nodes))
            await asyncio.sleep(seconds)
            loads.cancel()
            await asyncio.gather(loads, return_exceptions=True)
            await asyncio.sleep(5.0)
            assert all(node.is_idle for node in nodes)
        await all_at_once(nodes, store)

    nodes, _, _ = play(story, count=3)
    assert_all_here(nodes)


class Promising(Wire):
    """A peer that says of each chunk that it will have it, and never has it."""

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        self.node = self.target.name
        await asyncio.sleep(wait_s)
        return [ChunkState.WANTED] * len(digests)


class Lying(Promising):
    """One that says as well that others arrive there."""

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        said = await super().query_chunks(tenant, digests, node, wait_s)
        self.moved_at = self._loop.time()
        return said


class Silent(Wire):
    """A peer that says once what a promising one says, and then does not answer."""

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        if self.node is None:
            self.node = self.target.name
            return [ChunkState.WANTED] * len(digests)
        await asyncio.sleep(wait_s + 5.0)
        self._fail(TimeoutError())
        return None


class Hasty(Wire):
    """A promising one that does not wait before it answers. Asked too often, it ends the test."""

    questions = 0

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        self.node = self.target.name
        self.questions += 1
        assert self.questions < 16 * 10 * (STALL_S + 1), "ten times a second for each of 16 chunks"
        await asyncio.sleep(0.001)
        return [ChunkState.WANTED] * len(digests)


def test_an_owner_that_answers_at_once_is_not_asked_without_a_pause() -> None:
    """It is asked ten times a second for each chunk that is waited for, until it is given up."""

    async def story(nodes: list[Node], store: Store) -> None:
        nodes[0].meet([Hasty(nodes[1])])
        await nodes[0].load(DIGESTS)

    nodes, _, _ = play(story, count=2)
    assert_all_here(nodes[:1])


@pytest.mark.parametrize(
    ("kind", "at_most_s"),
    [
        pytest.param(Promising, STALL_S + 2 * WAIT_S, id="promises for ever"),
        pytest.param(Lying, PATIENCE_S + 2 * WAIT_S, id="and says that it gets on"),
        pytest.param(Silent, WAIT_S + 5.0, id="does not answer"),
    ],
)
def test_an_owner_that_never_has_it(kind: type[Wire], at_most_s: float) -> None:
    """It costs a bounded time, once for all its chunks: then the store is read."""

    async def story(nodes: list[Node], store: Store) -> None:
        nodes[0].meet([kind(nodes[1])])
        await nodes[0].load(DIGESTS)

    nodes, store, took_s = play(story, count=2)
    assert_all_here(nodes[:1])
    assert store.reads == Counter(dict.fromkeys(DIGESTS, 1))
    assert took_s < COUNT * CHUNK / THROTTLE + at_most_s


def test_a_chunk_that_is_there_does_not_wait_behind_an_owner() -> None:
    """Beside a peer that never has what it owns, another version comes from the peer that has it at once."""

    async def story(nodes: list[Node], store: Store) -> None:
        await nodes[2].load(DIGESTS[: COUNT // 2])
        nodes[0].meet([Promising(nodes[1]), Wire(nodes[2])])
        stuck = asyncio.create_task(nodes[0].load(DIGESTS[COUNT // 2 :]))
        await asyncio.sleep(1.0)
        began_s = asyncio.get_running_loop().time()
        await nodes[0].load(DIGESTS[: COUNT // 2])
        assert asyncio.get_running_loop().time() - began_s < 1.0
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)

    nodes, _, _ = play(story, count=3)
    assert nodes[0].here >= set(DIGESTS[: COUNT // 2])


def test_chunks_of_a_slow_owner_keep_those_of_a_quick_one_from_nothing() -> None:
    """Of three nodes that begin at once, one takes 3 s for each chunk that it owns. What another one owns is here as
    soon as that has read it.
    """
    names = ["node0", "node1", "node2"]
    of_the_quick = [digest for digest in DIGESTS if max(names, key=lambda node: rank(node, digest)) == "node2"]

    async def story(nodes: list[Node], store: Store) -> None:
        nodes[1].source.store = Store(rate=CHUNK / 3)
        loads = [asyncio.create_task(node.load(DIGESTS)) for node in nodes]
        await asyncio.sleep(COUNT * CHUNK / THROTTLE + WAIT_S)
        assert nodes[0].here >= set(of_the_quick)
        await asyncio.gather(*loads)

    nodes, _, _ = play(story, count=3)
    assert_all_here(nodes)


def test_one_that_began_anew_is_asked_for_its_name() -> None:
    """An agent has another name after a restart. Who is loading then learns it, and no chunk is read twice."""

    async def story(nodes: list[Node], store: Store) -> None:
        first = asyncio.create_task(nodes[0].load(DIGESTS))
        await asyncio.sleep(0.5)
        nodes[1] = anew = Node("another name", store)
        anew.meet([Wire(nodes[0])])
        known = nodes[0].group.peers[0]
        assert isinstance(known, Wire)
        known.target = anew
        await asyncio.gather(first, anew.load(DIGESTS))

    nodes, store, _ = play(story, count=2)
    assert_all_here(nodes)
    assert store.reads == Counter(dict.fromkeys(DIGESTS, 1))


def test_a_node_that_claimed_a_chunk_waits_for_nobody() -> None:
    """Its owner begins later and waits for this node. Another load of this node must not wait for the owner then."""

    async def story(nodes: list[Node], store: Store) -> None:
        digest = next(each for each in DIGESTS if rank("node1", each) > rank("node0", each))
        key, node = (TENANT, digest), nodes[0]
        with node.tier.loading(key):
            await node.tier.ask(key)
            assert node.group.claim(key)
            said = await node.group.answer(TENANT, ChunkQuery(digests=(digest,), node="node1"))
            assert said.standings == ChunkState.CLAIMED
            assert node.tier.owner(key) is None

    play(story, count=2)


def test_a_question_about_several_with_a_wait() -> None:
    """An agent of an earlier build asks so: it is answered once one of them is here, or will not be."""

    async def story(nodes: list[Node], store: Store) -> None:
        loop, node = asyncio.get_running_loop(), nodes[0]
        load = asyncio.create_task(node.load(DIGESTS))
        await asyncio.sleep(0.1)
        found = await node.group.answer(TENANT, ChunkQuery(digests=tuple(DIGESTS), node="old", wait_s=5.0))
        assert "r" in found.standings
        assert found.moved > 0
        assert loop.time() < 1.0
        await load
        at_s = loop.time()
        found = await node.group.answer(TENANT, ChunkQuery(digests=("0" * 64,), node="old", wait_s=5.0))
        assert (found.standings, loop.time()) == ("-", at_s)

    play(story, count=1)


def _without_turns(me: str, digest: str, others: Mapping[str, ChunkState], busy: object) -> str | None:
    return next((node for node, said in others.items() if said is ChunkState.READY), None)


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without owners chunks leave the store several times, and it takes as much longer."""
    monkeypatch.setattr(peer_group, "choose", _without_turns)
    nodes, store, took_s = play(all_at_once)
    assert_all_here(nodes)
    assert store.reads.total() > 2 * COUNT
    assert took_s > 2 * COUNT * CHUNK / THROTTLE
