"""Who asks for a slot, how urgently, and what it takes."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import msgspec

from activator.policy.affinity import Affinity
from contracts.control import Priority
from contracts.errors import InvalidRequest, Refused


class Rank(IntEnum):
    """How urgent a request is. Each says so of itself, and none can say more than its tenant's highest, which is the
    default.
    """

    BATCH = 0
    STANDARD = 1
    INTERACTIVE = 2


# What a rank is given of the slots while others wait, too; of a full queue a lower one keeps as much (`crowd`).
WEIGHTS: Final[Mapping[Rank, int]] = {Rank.INTERACTIVE: 16, Rank.STANDARD: 4, Rank.BATCH: 1}
_NAMED: Final[Mapping[str, Rank]] = {rank.name.lower(): rank for rank in Rank}


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What is asked for."""

    tenant: str  # the caller's
    nbytes: int  # of the body
    tokens: int  # as they are estimated
    rank: Rank = Rank.INTERACTIVE
    affinity: Affinity | None = None  # to a replica
    weight: int = 1  # the tenant's


def read_rank(priority: bytes | None, highest: Priority | None = None) -> Rank:
    """Of the header `x-kelvin-priority`, as far as the tenant may have it. Raises Refused(InvalidRequest)."""
    most = Rank.INTERACTIVE if highest is None else _NAMED[highest]
    if priority is None:
        return most
    rank = _NAMED.get(priority.decode("latin-1").lower())
    if rank is not None:
        return min(rank, most)
    raise Refused(InvalidRequest("x-kelvin-priority", repr(priority[:20]), "must be batch, standard or interactive"))
