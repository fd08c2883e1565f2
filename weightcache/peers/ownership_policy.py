"""Which node a chunk is taken from, and which one reads it from the store for all that want it. Pure.

Of the nodes that want a chunk one owns it: the first by a hash of node and chunk (rendezvous hashing: Thaler and
Ravishankar, 1998), so that nodes agree without a word. The owner reads the chunk from the store and serves the others,
as in groupcache. A node waits only for one that is reading the chunk already, or for one that ranks before it:
therefore never in a circle, whatever each of them knows of the others.
"""

from collections.abc import Container, Mapping
from enum import StrEnum

from blake3 import blake3


class ChunkState(StrEnum):
    """What a node says of a chunk."""

    READY = "r"  # it has it, verified
    CLAIMED = "c"  # it is reading it from the store
    WANTED = "w"  # it will have it, from its owner
    ABSENT = "-"


def rank(node: str, digest: str) -> bytes:
    """Return the node's rank for the chunk. The node with the highest rank owns it; each owns about equally many."""
    return blake3(f"{node} {digest}".encode()).digest()


def choose(me: str, digest: str, others: Mapping[str, ChunkState], busy: Container[str] = ()) -> str | None:
    """Return the node to take the chunk from; None: this node owns it. `others` are those that answer.

    1. A node that has it, rather one that is not busy.
    2. The node that is reading it from the store.
    3. The owner, where that is not this node.
    """
    for standing in (ChunkState.READY, ChunkState.CLAIMED):
        if nodes := [node for node, said in others.items() if said is standing]:
            return max(nodes, key=lambda node: (node not in busy, rank(node, digest)))
    wanting = [node for node, said in others.items() if said is ChunkState.WANTED]
    owner = max([me, *wanting], key=lambda node: rank(node, digest))
    return None if owner == me else owner
