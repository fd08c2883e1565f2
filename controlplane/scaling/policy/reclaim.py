"""Whose replicas make room when every device slot is held and a version at zero is asked for. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K")

MIN_IDLE_S: Final = 2.0  # two reports: less could be the pause between two tokens' requests


@dataclass(frozen=True, slots=True)
class SlotHolder(Generic[K]):
    """A version that holds slots. `last_request_s` is when it was last asked for."""

    key: K
    ready: int
    live: int
    least: int
    last_request_s: float


def choose_victim(holders: Iterable[SlotHolder[K]], now: float) -> K | None:
    """The version that has been idle for longest, if one may go: nothing of it restores, and it is over its minimum."""
    idle = [
        holder
        for holder in holders
        if holder.ready and holder.ready == holder.live > holder.least and now - holder.last_request_s >= MIN_IDLE_S
    ]
    return min(idle, key=lambda holder: holder.last_request_s).key if idle else None
