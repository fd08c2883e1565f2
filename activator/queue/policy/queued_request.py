"""A request for a slot: its tenant, its priority class and its size."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import msgspec

from activator.routing.policy.affinity import Affinity
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.serving.control_messages import Priority


class PriorityClass(IntEnum):
    """How urgent a request is. The request states it. The tenant's highest class is the default and the upper bound."""

    BATCH = 0
    STANDARD = 1
    INTERACTIVE = 2


# Shares of the slots while all classes wait. Lower classes keep the same shares of a full queue (`shed_order.py`).
WEIGHTS: Final[Mapping[PriorityClass, int]] = {
    PriorityClass.INTERACTIVE: 16,
    PriorityClass.STANDARD: 4,
    PriorityClass.BATCH: 1,
}
_NAMED: Final[Mapping[str, PriorityClass]] = {
    priority_class.name.lower(): priority_class for priority_class in PriorityClass
}


class QueuedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that needs a slot."""

    tenant: str  # of the caller
    nbytes: int  # size of the body
    tokens: int  # estimated
    priority_class: PriorityClass = PriorityClass.INTERACTIVE
    affinity: Affinity | None = None  # key of the replica that it belongs to
    weight: int = 1  # weight of the tenant


def read_priority_class(priority: bytes | None, highest: Priority | None = None) -> PriorityClass:
    """Return the class in `x-kelvin-priority`, at most the tenant's highest. Raises Refused(InvalidRequest)."""
    upper_bound = PriorityClass.INTERACTIVE if highest is None else _NAMED[highest]
    if priority is None:
        return upper_bound
    priority_class = _NAMED.get(priority.decode("latin-1").lower())
    if priority_class is not None:
        return min(priority_class, upper_bound)
    raise Refused(InvalidRequest("x-kelvin-priority", repr(priority[:20]), "must be batch, standard or interactive"))
