"""Where a node takes a chunk from that it lacks: another node that has it, one that is about to, or the store. Pure.

Several nodes that miss a version at once each begin with their own part of it. Who goes to the store for a chunk is
the first of those that want it, by a hash of chunk and node (rendezvous hashing: Thaler and Ravishankar, 1998), so that
nodes agree without a word. One waits only for a node that is reading the chunk already, or for one that ranks before:
therefore never in a circle, whatever each of them knows of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from blake3 import blake3

RELUCTANCE: Final = 8.0  # the store has to be so many times as quick as nodes are: all share it, and it is paid for
TRY_STORE_S: Final = 5.0  # until from a node: then a store that was never measured is tried


class Standing(StrEnum):
    """What a node says of a chunk."""

    READY = "r"  # it has it, verified
    CLAIMED = "c"  # it is reading it from its disk or the store
    WANTED = "w"  # it will have it, from whomever
    ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Other:
    """A node that answers, and what it said of the chunk. `expected_s` is until it would have sent it, where known."""

    node: str
    standing: Standing
    expected_s: float | None = None
    busy: bool = False  # it has, but asked not to be asked for a while
    moving: bool = True  # chunks arrive there


@dataclass(frozen=True, slots=True)
class FromPeer:
    """Ask this node for it."""

    node: str


@dataclass(frozen=True, slots=True)
class FromStore:
    """Read it from the store; others may wait for it."""


@dataclass(frozen=True, slots=True)
class Await:
    """This node will have it."""

    node: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Look again soon: who has it is busy, or whose turn it is may not have begun yet."""


Choice = FromPeer | FromStore | Await | Pause


def rank(node: str, digest: str) -> bytes:
    """The node with the highest one reads the chunk for all. Of as many nodes, each is first for as many chunks."""
    return blake3(f"{node} {digest}".encode()).digest()


def choose(
    me: str,
    digest: str,
    others: Sequence[Other],
    *,
    store_s: float | None,
    peers_s: float | None,
    settled: bool,
    patient: bool,
) -> Choice:
    """First rule that holds. `store_s` is how long the store takes for as many bytes, `peers_s` all nodes together;
    None: not measured. `settled`: who would begin at the same moment has had the time to say so; `patient`: waiting has
    not taken too long.
    """
    holders = [other for other in others if other.standing is Standing.READY]
    free = [other for other in holders if not other.busy]
    if free:
        best = min(free, key=lambda other: (other.expected_s or 0.0, rank(other.node, digest)))
        sharing = 1 + sum(other.standing is Standing.WANTED for other in others)
        share_s = None if store_s is None else store_s * sharing
        return FromStore() if _is_far_slower(best, peers_s, share_s) else FromPeer(best.node)
    if not patient:
        return FromStore()
    if holders:
        return Pause()
    own = rank(me, digest)
    reading = [other for other in others if other.standing is Standing.CLAIMED and other.moving]
    if reading:
        return Await(_first(reading, digest).node)
    before = [
        other
        for other in others
        if other.standing is Standing.WANTED and other.moving and rank(other.node, digest) > own
    ]
    if before:
        return Await(_first(before, digest).node)
    if not settled and any(rank(other.node, digest) > own for other in others):
        return Pause()
    return FromStore()


def _is_far_slower(best: Other, peers_s: float | None, store_s: float | None) -> bool:
    """What all nodes together bring counts, not what waits at one of them, or what it has left for us; and of the store
    the share that would be ours if all who want the chunk turned there: while they take it from one another the store
    has little to do, which is no reason to.
    """
    if store_s is None:
        return best.expected_s is not None and best.expected_s > TRY_STORE_S
    return peers_s is not None and peers_s > RELUCTANCE * store_s


def _first(others: Sequence[Other], digest: str) -> Other:
    return max(others, key=lambda other: rank(other.node, digest))
