"""Who asks for a slot, how urgently, and what it takes."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import msgspec

from activator.routing.policy.affinity import Affinity
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.serving.control_messages import Priority


class PriorityClass(IntEnum):
    """How urgent a request is. Each says so of itself, and none can say more than its tenant's highest, which is the
    default.
    """

    BATCH = 0
    STANDARD = 1
    INTERACTIVE = 2


# What a rank is given of the slots while others wait, too; of a full queue a lower one keeps as much (`crowd`).
WEIGHTS: Final[Mapping[PriorityClass, int]] = {
    PriorityClass.INTERACTIVE: 16,
    PriorityClass.STANDARD: 4,
    PriorityClass.BATCH: 1,
}
_NAMED: Final[Mapping[str, PriorityClass]] = {
    priority_class.name.lower(): priority_class for priority_class in PriorityClass
}


class QueuedRequest(msgspec.Struct, frozen=True, gc=False):
    """What is asked for."""

    tenant: str  # the caller's
    nbytes: int  # of the body
    tokens: int  # as they are estimated
    priority_class: PriorityClass = PriorityClass.INTERACTIVE
    affinity: Affinity | None = None  # to a replica
    weight: int = 1  # the tenant's


def read_priority_class(priority: bytes | None, highest: Priority | None = None) -> PriorityClass:
    """Of the header `x-kelvin-priority`, as far as the tenant may have it. Raises Refused(InvalidRequest)."""
    most = PriorityClass.INTERACTIVE if highest is None else _NAMED[highest]
    if priority is None:
        return most
    priority_class = _NAMED.get(priority.decode("latin-1").lower())
    if priority_class is not None:
        return min(priority_class, most)
    raise Refused(InvalidRequest("x-kelvin-priority", repr(priority[:20]), "must be batch, standard or interactive"))
