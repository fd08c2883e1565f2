"""Which peer a chunk is read from, or who reads it from the store: a table, and the proof that waits form no cycle."""

from collections import Counter

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightcache.peers.ownership_policy import ChunkState, choose_node, rank

R, C, W, A = ChunkState.READY, ChunkState.CLAIMED, ChunkState.WANTED, ChunkState.ABSENT
DIGEST = blake3(b"a chunk").hexdigest()
LOW, ME, MID, HIGH = sorted(("one", "two", "three", "four"), key=lambda node: rank(node, DIGEST))


@pytest.mark.parametrize(
    ("others", "busy", "want"),
    [
        pytest.param({}, [], None, id="alone"),
        pytest.param({HIGH: A}, [], None, id="no other node wants it"),
        pytest.param({LOW: R}, [], LOW, id="a node that has it sends it"),
        pytest.param({LOW: R, MID: R}, [], MID, id="of several the one of highest rank"),
        pytest.param({LOW: R, MID: R}, [MID], LOW, id="of several one that is not busy"),
        pytest.param({LOW: R}, [LOW], LOW, id="the only one that has it, even if busy"),
        pytest.param({LOW: R, HIGH: C}, [], LOW, id="having is better than reading"),
        pytest.param({LOW: C}, [], LOW, id="a node that is reading it, whatever its rank"),
        pytest.param({LOW: W}, [], None, id="a node of lower rank waits for us"),
        pytest.param({HIGH: W}, [], HIGH, id="a node of higher rank owns it"),
        pytest.param({MID: W, HIGH: W}, [], HIGH, id="of several the one of highest rank owns it"),
        pytest.param({HIGH: W, MID: C}, [], MID, id="reading comes before wanting"),
    ],
)
def test_ready_node_comes_before_reader_and_owner(
    others: dict[str, ChunkState], busy: list[str], want: str | None
) -> None:
    assert choose_node(ME, DIGEST, others, busy) == want


def test_ranks_divide_chunks_evenly() -> None:
    """Each of eight nodes ranks first for about an eighth of the chunks."""
    nodes = [f"node{number}" for number in range(8)]
    digests = [blake3(bytes([number % 256, number // 256])).hexdigest() for number in range(2000)]
    first = Counter(max(nodes, key=lambda node: rank(node, digest)) for digest in digests)
    assert all(170 < first[node] < 330 for node in nodes)


def test_leaving_node_moves_only_its_chunks() -> None:
    """If a node leaves, the chunks of the others keep their owners."""
    nodes = [f"node{number}" for number in range(8)]
    for number in range(300):
        digest = blake3(bytes([number % 256, number // 256])).hexdigest()
        before = max(nodes, key=lambda node: rank(node, digest))
        after = max(nodes[1:], key=lambda node: rank(node, digest))
        assert before in (after, nodes[0])


@given(st.data())
def test_owner_waits_never_form_a_cycle(data: st.DataObject) -> None:
    """For any beliefs of the nodes about each other, waits form no cycle, and at least one node reads the chunk."""
    nodes = [f"node{number}" for number in range(data.draw(st.integers(1, 6)))]
    reading = {node for node in nodes if data.draw(st.booleans())}
    waits: dict[str, str] = {}
    for me in nodes:
        if me in reading:
            continue
        others = {
            node: data.draw(st.sampled_from([A, W, C] if node in reading else [A, W])) for node in nodes if node != me
        }
        owner = choose_node(me, DIGEST, others)
        if owner is not None:
            assert others[owner] in (C, W)
            waits[me] = owner
    for node in waits:
        seen = {node}
        while (node := waits.get(node, "")) != "":
            assert node not in seen, "a cycle"
            seen.add(node)
    assert len(waits) < len(nodes)
