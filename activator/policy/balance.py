"""Choose a replica: the less loaded of two (Mitzenmacher, "The power of two choices", 2001), drawn outside."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Streams running on a replica, of how many it takes."""

    running: int
    capacity: int


def less_loaded(first: Occupancy, second: Occupancy) -> bool:
    """Whether the second is the better choice: a smaller share of it is taken. Ties stay with the first."""
    return second.running * first.capacity < first.running * second.capacity
