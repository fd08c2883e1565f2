"""Decide which node a chunk is read from, and which node reads it from the store for all nodes that want it. Pure.

Of the nodes that want a chunk, one owns it: the first by a hash of node and chunk (rendezvous hashing: Thaler and
Ravishankar, 1998). So nodes agree without communication. The owner reads the chunk from the store and serves the
others, as in groupcache. A node waits only for a node that is reading the chunk already, or that ranks before it. So
nodes never wait in a circle, whatever each knows of the others.
"""

from collections.abc import Container, Mapping
from enum import StrEnum

from blake3 import blake3


class ChunkState(StrEnum):
    """A node's state of a chunk, as it reports it."""

    READY = "r"  # it has the chunk, verified
    CLAIMED = "c"  # it is reading the chunk from the store
    WANTED = "w"  # it wants the chunk, and has not begun to read it from the store
    ABSENT = "-"


def rank(node: str, digest: str) -> bytes:
    """Return the node's rank for the chunk. The highest rank owns the chunk; all nodes own about equally many."""
    return blake3(f"{node} {digest}".encode()).digest()


def choose_node(
    own_node: str, digest: str, peer_states: Mapping[str, ChunkState], busy_nodes: Container[str] = ()
) -> str | None:
    """Return the node to get the chunk from; None: this node owns it. `peer_states` has the other nodes.

    1. A node that has the chunk, preferably one that is not busy.
    2. The node that is reading the chunk from the store.
    3. The owner, if that is not this node.
    """
    # (1), (2)
    for preferred_state in (ChunkState.READY, ChunkState.CLAIMED):
        if nodes := [node for node, state in peer_states.items() if state is preferred_state]:
            return max(nodes, key=lambda node: (node not in busy_nodes, rank(node, digest)))
    # (3)
    wanting = [node for node, state in peer_states.items() if state is ChunkState.WANTED]
    owner = max([own_node, *wanting], key=lambda node: rank(node, digest))
    return None if owner == own_node else owner
