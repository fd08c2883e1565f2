"""From where a chunk is taken, and who goes to the store for it: in a table, and that nobody waits in a circle."""

from collections import Counter

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightcache.policy.mixing import Await, Choice, FromPeer, FromStore, Other, Pause, Standing, choose, rank

R, C, W, A = Standing.READY, Standing.CLAIMED, Standing.WANTED, Standing.ABSENT
DIGEST = blake3(b"a chunk").hexdigest()
LOW, ME, MID, HIGH = sorted(("one", "two", "three", "four"), key=lambda node: rank(node, DIGEST))


@pytest.mark.parametrize(
    ("others", "want"),
    [
        pytest.param([], FromStore(), id="alone"),
        pytest.param([Other(LOW, A)], FromStore(), id="nobody has it, and it is ours"),
        pytest.param([Other(LOW, R)], FromPeer(LOW), id="who has it gives it"),
        pytest.param(
            [Other(LOW, R, 2.0), Other(HIGH, R, 1.0)], FromPeer(HIGH), id="the quickest of those that have it"
        ),
        pytest.param([Other(LOW, R, 1.0), Other(HIGH, R)], FromPeer(HIGH), id="who was never measured is tried"),
        pytest.param([Other(LOW, R, 1.0), Other(HIGH, C)], FromPeer(LOW), id="having is better than reading"),
        pytest.param([Other(LOW, R, busy=True)], Pause(), id="busy: a moment later"),
        pytest.param([Other(LOW, R, busy=True), Other(HIGH, R, 3.0)], FromPeer(HIGH), id="or from another"),
        pytest.param([Other(LOW, C)], Await(LOW), id="who is reading it will have it, whoever ranks first"),
        pytest.param([Other(LOW, C, moving=False)], FromStore(), id="unless nothing arrives there"),
        pytest.param([Other(LOW, W)], FromStore(), id="one that ranks behind waits for us"),
        pytest.param([Other(HIGH, W)], Await(HIGH), id="one that ranks before is waited for"),
        pytest.param([Other(MID, W), Other(HIGH, W)], Await(HIGH), id="of several the first"),
        pytest.param([Other(HIGH, W), Other(MID, C)], Await(MID), id="reading comes before wanting"),
        pytest.param([Other(HIGH, W, moving=False)], FromStore(), id="one that stands still is not waited for"),
    ],
)
def test_choose(others: list[Other], want: Choice) -> None:
    """Once all have had the time to speak."""
    assert choose(ME, DIGEST, others, store_s=1.0, peers_s=1.0, settled=True, patient=True) == want


@pytest.mark.parametrize(
    ("others", "settled", "patient", "want"),
    [
        pytest.param([Other(HIGH, A)], False, True, Pause(), id="who ranks before may be about to begin"),
        pytest.param([Other(LOW, A)], False, True, FromStore(), id="our own are read at once"),
        pytest.param([Other(HIGH, C)], True, False, FromStore(), id="a wait has an end"),
        pytest.param([Other(HIGH, R, busy=True)], True, False, FromStore(), id="also for one that is busy"),
        pytest.param([Other(HIGH, R)], True, False, FromPeer(HIGH), id="after which a copy is still a copy"),
    ],
)
def test_time(others: list[Other], settled: bool, patient: bool, want: Choice) -> None:
    """In the first moment, and after too long a wait."""
    assert choose(ME, DIGEST, others, store_s=None, peers_s=None, settled=settled, patient=patient) == want


@pytest.mark.parametrize(
    ("expected_s", "peers_s", "store_s", "want"),
    [
        pytest.param(1.0, 8.1, 1.0, FromStore(), id="not from nodes that are far slower than the store"),
        pytest.param(1.0, 7.9, 1.0, FromPeer(HIGH), id="but from such that are merely slower"),
        pytest.param(90.0, 1.0, 1.0, FromPeer(HIGH), id="also where much is under way there"),
        pytest.param(1.0, None, 0.001, FromPeer(HIGH), id="and where no node was measured"),
        pytest.param(4.9, 9.0, None, FromPeer(HIGH), id="a store that was not measured is not asked"),
        pytest.param(5.1, 1.0, None, FromStore(), id="unless a node takes very long"),
        pytest.param(None, None, None, FromPeer(HIGH), id="nothing is known"),
    ],
)
def test_rates(expected_s: float | None, peers_s: float | None, store_s: float | None, want: Choice) -> None:
    """A node that has it, or the store after all."""
    others = [Other(HIGH, R, expected_s)]
    assert choose(ME, DIGEST, others, store_s=store_s, peers_s=peers_s, settled=True, patient=True) == want


@pytest.mark.parametrize(("wanting", "want"), [(0, FromStore()), (1, FromPeer(HIGH))])
def test_the_store_is_shared(wanting: int, want: Choice) -> None:
    """As quick as it looks it is for one; for those that want the chunk as well it would be less."""
    others = [Other(HIGH, R), *[Other(LOW, W), Other(MID, A)][: 2 * wanting]]
    assert choose(ME, DIGEST, others, store_s=1.0, peers_s=15.0, settled=True, patient=True) == want


def test_each_is_first_for_its_part() -> None:
    """Of eight nodes each is first for about an eighth, and for the same chunks whoever asks."""
    nodes = [f"node{number}" for number in range(8)]
    digests = [blake3(bytes([number % 256, number // 256])).hexdigest() for number in range(2000)]
    first = Counter(max(nodes, key=lambda node: rank(node, digest)) for digest in digests)
    assert all(170 < first[node] < 330 for node in nodes)


def test_a_node_less_moves_its_part_only() -> None:
    """When one leaves, chunks of others stay theirs."""
    nodes = [f"node{number}" for number in range(8)]
    for number in range(300):
        digest = blake3(bytes([number % 256, number // 256])).hexdigest()
        before = max(nodes, key=lambda node: rank(node, digest))
        after = max(nodes[1:], key=lambda node: rank(node, digest))
        assert before in (after, nodes[0])


@given(st.data())
def test_nobody_waits_in_a_circle(data: st.DataObject) -> None:
    """Whatever each node believes of the others, as long as who reads the chunk knows it: who waits for whom never
    closes a circle, and somebody reads it.
    """
    nodes = [f"node{number}" for number in range(data.draw(st.integers(1, 6)))]
    reading = {node for node in nodes if data.draw(st.booleans())}
    waits: dict[str, str] = {}
    for me in nodes:
        if me in reading:
            continue
        told = {
            node: data.draw(st.sampled_from([A, W, C] if node in reading else [A, W])) for node in nodes if node != me
        }
        others = [Other(node, standing) for node, standing in told.items()]
        match choose(me, DIGEST, others, store_s=None, peers_s=None, settled=True, patient=True):
            case Await(node):
                waits[me] = node
            case found:
                assert found == FromStore()
    for node in waits:
        seen = {node}
        while (node := waits.get(node, "")) != "":
            assert node not in seen, "a circle"
            seen.add(node)
    assert len(waits) < len(nodes)


@given(
    st.lists(st.tuples(st.sampled_from(Standing), st.none() | st.floats(0, 100), st.booleans(), st.booleans())),
    st.none() | st.floats(0, 100),
    st.none() | st.floats(0, 100),
    st.booleans(),
    st.booleans(),
)
def test_only_who_has_it_is_asked(
    told: list[tuple[Standing, float | None, bool, bool]],
    store_s: float | None,
    peers_s: float | None,
    settled: bool,
    patient: bool,
) -> None:
    """Nobody is asked who does not have it or is busy; nobody is waited for who does not want it or stands still."""
    others = [Other(f"node{n}", standing, s, busy, moving) for n, (standing, s, busy, moving) in enumerate(told)]
    known = {other.node: other for other in others}
    match choose("me", DIGEST, others, store_s=store_s, peers_s=peers_s, settled=settled, patient=patient):
        case FromPeer(node):
            assert known[node].standing is R
            assert not known[node].busy
        case Await(node):
            assert patient
            assert known[node].standing in (C, W)
            assert known[node].moving
        case Pause():
            assert patient
