"""Eight nodes that miss a version at once: which node reads which chunk from the store, on virtual time."""

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
from weightcache.peers.peer_group import OWN_STALL_S, OWNER_STALL_S, WAIT_S
from weightcache.peers.peer_protocol import ChunkQuery

SLOW_LINE = 6 * CHUNK


async def all_at_once(nodes: list[Node], store: Store) -> None:
    await asyncio.gather(*(node.load(DIGESTS) for node in nodes))


def later(*begins_s: float) -> Story:
    """Return a scenario in which each node begins at its time."""

    async def story(nodes: list[Node], store: Store) -> None:
        async def begin(node: Node, at_s: float) -> None:
            await asyncio.sleep(at_s)
            await node.load(DIGESTS)

        await asyncio.gather(*(begin(node, at_s) for node, at_s in zip(nodes, begins_s, strict=True)))

    return story


def test_all_at_once() -> None:
    """All nodes have the version in little more than the time of one read of it."""
    nodes, store, took_s = play(all_at_once)
    assert_all_here(nodes)
    assert store.reads == Counter(dict.fromkeys(DIGESTS, 1))
    assert took_s < 1.5 * COUNT * CHUNK / THROTTLE
    read = [COUNT - node.from_peers for node in nodes]
    assert min(read) > 0, "a node read nothing from the store"


@pytest.mark.parametrize(
    "begins_s",
    [
        pytest.param((0, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007), id="milliseconds apart"),
        pytest.param((0, 0.03, 0.06, 0.09, 0.12, 0.15, 0.18, 0.21), id="tens of milliseconds apart"),
        pytest.param((0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.8), id="while the first are loading"),
        pytest.param((0, 60, 61, 62, 63, 64, 65, 66), id="when the first has all"),
    ],
)
def test_nodes_that_begin_later_read_from_peers(begins_s: tuple[float, ...]) -> None:
    """At most a tenth of the chunks is read twice, whenever the nodes begin."""
    nodes, store, _ = play(later(*begins_s))
    assert_all_here(nodes)
    assert store.reads.total() <= 1.1 * COUNT


def test_node_with_idle_peers_is_hardly_delayed() -> None:
    """The node reads the whole version itself, and loses no more than the time of one query."""
    nodes, store, took_s = play(_first_alone)
    assert nodes[0].here == set(DIGESTS)
    assert store.reads.total() == COUNT
    assert took_s < COUNT * CHUNK / THROTTLE + 0.2


async def _first_alone(nodes: list[Node], store: Store) -> None:
    await nodes[0].load(DIGESTS)


def test_dead_owner_is_replaced() -> None:
    """Chunks that the dead node was to read are read by others, and all live nodes have the version."""

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
    """A node that answers, but makes no progress, is waited for only for a bounded time."""

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
    """Use such slow links that chunks queue at the nodes that have them, while the store is nearly idle."""
    for node in nodes:
        node.line.rate = SLOW_LINE
    await all_at_once(nodes, store)


def test_queues_at_peers_cause_no_store_reads() -> None:
    """Each chunk is read about once, although the store would send it sooner than any node."""
    nodes, store, _ = play(over_slow_lines)
    assert_all_here(nodes)
    assert store.reads.total() <= 1.1 * COUNT


@pytest.mark.parametrize("tells", [True, False], ids=["part by part", "control: only at the end"])
def test_slow_chunk_is_waited_for_while_parts_arrive(tells: bool) -> None:
    """While parts of a chunk arrive at its owner, others wait for it, however long the whole chunk takes."""

    async def story(nodes: list[Node], store: Store) -> None:
        for node in nodes:
            node.source.tells = tells
        await all_at_once(nodes, store)

    nodes, store, _ = play(story, count=2, rate=CHUNK / 5)  # twelve reads run at once, so each takes a minute
    assert_all_here(nodes)
    assert (store.reads.total() == COUNT) == tells


def test_cancelled_load_leaves_no_claim() -> None:
    """A load that is cancelled in any of its waits leaves nothing wanted, claimed or watched."""

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
    """A peer that wants every chunk, and never has one."""

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        self.node = self.target.name
        await asyncio.sleep(wait_s)
        return [ChunkState.WANTED] * len(digests)


class Lying(Promising):
    """A promising peer that also reports progress."""

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        answer = await super().query_chunks(tenant, digests, node, wait_s)
        self.progress_at_s = self._loop.time()
        return answer


class Silent(Wire):
    """A peer that wants every chunk in its first answer, and answers no more."""

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        if self.node is None:
            self.node = self.target.name
            return [ChunkState.WANTED] * len(digests)
        await asyncio.sleep(wait_s + 5.0)
        self._record_failure(TimeoutError())
        return None


class Hasty(Wire):
    """A promising peer that answers without waiting. Too many queries fail the test."""

    questions = 0

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        self.node = self.target.name
        self.questions += 1
        assert self.questions < 16 * 10 * (OWNER_STALL_S + 1), "more than ten queries a second for each of 16 chunks"
        await asyncio.sleep(0.001)
        return [ChunkState.WANTED] * len(digests)


def test_owner_that_answers_at_once_is_polled_slowly() -> None:
    """The owner is asked at most ten times a second for each chunk, until it is given up."""

    async def story(nodes: list[Node], store: Store) -> None:
        nodes[0].meet([Hasty(nodes[1])])
        await nodes[0].load(DIGESTS)

    nodes, _, _ = play(story, count=2)
    assert_all_here(nodes[:1])


@pytest.mark.parametrize(
    ("kind", "at_most_s"),
    [
        pytest.param(Promising, OWNER_STALL_S + 2 * WAIT_S, id="always claims to want it"),
        pytest.param(Lying, OWN_STALL_S + 2 * WAIT_S, id="claims that other chunks arrive"),
        pytest.param(Silent, WAIT_S + 5.0, id="stops answering"),
    ],
)
def test_owner_that_never_has_the_chunk_is_given_up(kind: type[Wire], at_most_s: float) -> None:
    """The owner delays the load for a bounded time, once for all chunks. Then the store is read."""

    async def story(nodes: list[Node], store: Store) -> None:
        nodes[0].meet([kind(nodes[1])])
        await nodes[0].load(DIGESTS)

    nodes, store, took_s = play(story, count=2)
    assert_all_here(nodes[:1])
    assert store.reads == Counter(dict.fromkeys(DIGESTS, 1))
    assert took_s < COUNT * CHUNK / THROTTLE + at_most_s


def test_ready_chunk_does_not_wait_for_another_owner() -> None:
    """While one load waits for a peer that never has its chunks, another load reads from a peer that has them."""

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


def test_slow_owner_does_not_delay_chunks_of_others() -> None:
    """One of three nodes needs 3 s for each of its chunks. Chunks of another node arrive as soon as it read them."""
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


def test_restarted_owner_gets_its_new_name() -> None:
    """A restarted agent has another name. A node that is loading learns it, and no chunk is read twice."""

    async def story(nodes: list[Node], store: Store) -> None:
        first = asyncio.create_task(nodes[0].load(DIGESTS))
        await asyncio.sleep(0.5)
        nodes[1] = restarted = Node("another name", store)
        restarted.meet([Wire(nodes[0])])
        known = nodes[0].group.peers[0]
        assert isinstance(known, Wire)
        known.target = restarted
        await asyncio.gather(first, restarted.load(DIGESTS))

    nodes, store, _ = play(story, count=2)
    assert_all_here(nodes)
    assert store.reads == Counter(dict.fromkeys(DIGESTS, 1))


def test_node_with_a_claim_waits_for_no_owner() -> None:
    """The chunk's owner, which begins later, waits for this node, so no load of this node may wait for the owner."""

    async def story(nodes: list[Node], store: Store) -> None:
        digest = next(each for each in DIGESTS if rank("node1", each) > rank("node0", each))
        key, node = (TENANT, digest), nodes[0]
        with node.tier.mark_wanted(key):
            await node.tier.query_peers(key)
            assert node.group.try_claim(key)
            answer = await node.group.answer_query(TENANT, ChunkQuery(digests=(digest,), node="node1"))
            assert answer.standings == ChunkState.CLAIMED
            assert node.tier.find_owner(key) is None

    play(story, count=2)


def test_query_of_an_older_agent_is_answered() -> None:
    """Older agents ask for several chunks with a wait. The answer comes once one is ready, or if none is wanted."""

    async def story(nodes: list[Node], store: Store) -> None:
        loop, node = asyncio.get_running_loop(), nodes[0]
        load = asyncio.create_task(node.load(DIGESTS))
        await asyncio.sleep(0.1)
        found = await node.group.answer_query(TENANT, ChunkQuery(digests=tuple(DIGESTS), node="old", wait_s=5.0))
        assert "r" in found.standings
        assert found.moved > 0
        assert loop.time() < 1.0
        await load
        at_s = loop.time()
        found = await node.group.answer_query(TENANT, ChunkQuery(digests=("0" * 64,), node="old", wait_s=5.0))
        assert (found.standings, loop.time()) == ("-", at_s)

    play(story, count=1)


def _without_turns(me: str, digest: str, others: Mapping[str, ChunkState], busy: object) -> str | None:
    return next((node for node, state in others.items() if state is ChunkState.READY), None)


def test_control_without_owners_reads_chunks_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without owners, chunks are read more than twice on average, and it takes as much longer."""
    monkeypatch.setattr(peer_group, "choose_node", _without_turns)
    nodes, store, took_s = play(all_at_once)
    assert_all_here(nodes)
    assert store.reads.total() > 2 * COUNT
    assert took_s > 2 * COUNT * CHUNK / THROTTLE
