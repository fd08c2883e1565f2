"""Choose the version that gives up a replica when all device slots are held and one at zero is requested. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K")

MIN_IDLE_S: Final = 2.0  # two reports; a shorter gap may lie between the requests of two tokens


@dataclass(frozen=True, slots=True)
class SlotHolder(Generic[K]):
    """A version that holds slots. `last_request_s` is when it was last requested. `minimum` replicas stay."""

    key: K
    ready: int
    live: int
    minimum: int
    last_request_s: float


def choose_victim(holders: Iterable[SlotHolder[K]], now: float) -> K | None:
    """Return the version that has been idle longest, is above its minimum and has no replica starting, or None."""
    idle = [
        holder
        for holder in holders
        if holder.ready and holder.ready == holder.live > holder.minimum and now - holder.last_request_s >= MIN_IDLE_S
    ]
    return min(idle, key=lambda holder: holder.last_request_s).key if idle else None
