"""Eight nodes that miss a version at once: who reads which chunk from the store, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.weightcache.peer_nodes import CHUNK, COUNT, DIGESTS, THROTTLE, Node, Store, Story, assert_all_here, play
from weightcache import peer_tier
from weightcache.policy import mixing
from weightcache.policy.mixing import Choice, FromPeer, FromStore, Other, Standing

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


def test_control_by_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what waits at a node counts against it, all turn to the store when they take most from one another."""

    def by_queue(best: Other, peers_s: float | None, store_s: float | None) -> bool:
        return best.expected_s is not None and best.expected_s > (store_s or 1.0)

    monkeypatch.setattr(mixing, "_is_far_slower", by_queue)
    nodes, store, _ = play(over_slow_lines)
    assert_all_here(nodes)
    assert store.reads.total() > 1.2 * COUNT


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


def _without_turns(me: str, digest: str, others: Sequence[Other], **_: object) -> Choice:
    ready = [other for other in others if other.standing is Standing.READY]
    return FromPeer(ready[0].node) if ready else FromStore()


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without turns chunks leave the store several times, and it takes as much longer."""
    monkeypatch.setattr(peer_tier, "choose", _without_turns)
    nodes, store, took_s = play(all_at_once)
    assert_all_here(nodes)
    assert store.reads.total() > 2 * COUNT
    assert took_s > 2 * COUNT * CHUNK / THROTTLE
