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

RELUCTANCE: Final = 8.0  # the store has to be so many times as quick as a node: all others share it, and it is paid for


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
    me: str, digest: str, others: Sequence[Other], *, store_s: float | None, settled: bool, patient: bool
) -> Choice:
    """First rule that holds. `store_s` is what a read of the store is expected to take, where that was measured;
    `settled`: who would begin at the same moment has had the time to say so; `patient`: waiting has not taken too long.
    """
    holders = [other for other in others if other.standing is Standing.READY]
    free = [other for other in holders if not other.busy]
    if free:
        best = min(free, key=lambda other: (other.expected_s or 0.0, rank(other.node, digest)))
        slower = best.expected_s is not None and store_s is not None and store_s * RELUCTANCE < best.expected_s
        return FromStore() if slower else FromPeer(best.node)
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


def _first(others: Sequence[Other], digest: str) -> Other:
    return max(others, key=lambda other: rank(other.node, digest))
