"""Who asks for a slot, how urgently, and what it takes."""

from enum import IntEnum

import msgspec

from activator.policy.affinity import Affinity
from contracts.errors import InvalidRequest, Refused


class Rank(IntEnum):
    """How urgent a request is. Each says so of itself, and none can say more than the highest, which is the default."""

    BATCH = 0
    STANDARD = 1
    INTERACTIVE = 2


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What is asked for."""

    tenant: str  # the caller's
    nbytes: int  # of the body
    tokens: int  # as they are estimated
    rank: Rank = Rank.INTERACTIVE
    affinity: Affinity | None = None  # to a replica
    weight: int = 1  # the tenant's


def read_rank(priority: bytes | None) -> Rank:
    """Of the header `x-kelvin-priority`. Raises Refused(InvalidRequest)."""
    if priority is None:
        return Rank.INTERACTIVE
    for rank in Rank:
        if priority.decode("latin-1").lower() == rank.name.lower():
            return rank
    raise Refused(InvalidRequest("x-kelvin-priority", repr(priority[:20]), "must be batch, standard or interactive"))
