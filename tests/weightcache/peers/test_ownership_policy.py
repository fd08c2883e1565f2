"""From where a chunk is taken, and who reads it from the store: in a table, and that nobody waits in a circle."""

from collections import Counter

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightcache.peers.ownership_policy import ChunkState, choose, rank

R, C, W, A = ChunkState.READY, ChunkState.CLAIMED, ChunkState.WANTED, ChunkState.ABSENT
DIGEST = blake3(b"a chunk").hexdigest()
LOW, ME, MID, HIGH = sorted(("one", "two", "three", "four"), key=lambda node: rank(node, DIGEST))


@pytest.mark.parametrize(
    ("others", "busy", "want"),
    [
        pytest.param({}, [], None, id="alone"),
        pytest.param({HIGH: A}, [], None, id="nobody else wants it"),
        pytest.param({LOW: R}, [], LOW, id="who has it gives it"),
        pytest.param({LOW: R, MID: R}, [], MID, id="of several the first by rank"),
        pytest.param({LOW: R, MID: R}, [MID], LOW, id="but one that is not busy"),
        pytest.param({LOW: R}, [LOW], LOW, id="the only one that has it, busy as it is"),
        pytest.param({LOW: R, HIGH: C}, [], LOW, id="having is better than reading"),
        pytest.param({LOW: C}, [], LOW, id="who is reading it will have it, whoever ranks first"),
        pytest.param({LOW: W}, [], None, id="one that ranks behind waits for us"),
        pytest.param({HIGH: W}, [], HIGH, id="one that ranks before owns it"),
        pytest.param({MID: W, HIGH: W}, [], HIGH, id="of several the first owns it"),
        pytest.param({HIGH: W, MID: C}, [], MID, id="reading comes before wanting"),
    ],
)
def test_choose(others: dict[str, ChunkState], busy: list[str], want: str | None) -> None:
    """The first rule that holds."""
    assert choose(ME, DIGEST, others, busy) == want


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
def test_owner_waits_never_form_a_cycle(data: st.DataObject) -> None:
    """Whatever each node believes of the others, as long as who reads the chunk knows it: who waits for whom never
    closes a circle, and somebody reads it.
    """
    nodes = [f"node{number}" for number in range(data.draw(st.integers(1, 6)))]
    reading = {node for node in nodes if data.draw(st.booleans())}
    waits: dict[str, str] = {}
    for me in nodes:
        if me in reading:
            continue
        others = {
            node: data.draw(st.sampled_from([A, W, C] if node in reading else [A, W])) for node in nodes if node != me
        }
        owner = choose(me, DIGEST, others)
        if owner is not None:
            assert others[owner] in (C, W)
            waits[me] = owner
    for node in waits:
        seen = {node}
        while (node := waits.get(node, "")) != "":
            assert node not in seen, "a circle"
            seen.add(node)
    assert len(waits) < len(nodes)
