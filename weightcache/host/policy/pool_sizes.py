"""How many threads read, hash and make memory, and how many slabs they make ahead. Pure.

Slabs are made so that restores find memory ready, and never more than the budget's.

Reads and hashes have threads of their own: in one pool chunks fall into step, all reading and then all hashing, and the
disk stands still meanwhile (measured on two cores: 0.75 of the plain O_DIRECT rate against 0.92).
"""

from dataclasses import dataclass
from typing import Final

READS: Final = (8, 16)  # a disk needs some four in flight, whatever the cores, while as many open or close files
HASHES: Final = (2, 8)  # 7 GB/s each, of tags four times as much: 8 are beyond any disk
MAKERS: Final = (1, 4)


@dataclass(frozen=True, slots=True)
class SlabCounts:
    """Slabs by what they are doing, and how many are waited for."""

    used: int
    free: int
    making: int
    waiting: int


def slabs_to_make(stock: SlabCounts, limit: int, spare: int, at_once: int) -> int:
    """How many more to begin. Who waits is served by as many as can be made at once; the spare ones, for whom nobody
    waits yet, are made one after another, so that they take one core at the most from whoever computes.
    """
    room = limit - stock.used - stock.free - stock.making
    missing = stock.waiting - stock.free - stock.making
    if stock.waiting:
        return max(0, min(missing, room, at_once - stock.making))
    return max(0, min(1 - stock.making, spare - stock.free, room))


def spare_slabs(host_bytes: int, slab_bytes: int, spare_bytes: int) -> int:
    """Slabs that are kept ready: whole ones, at least one, at most the budget's."""
    return max(1, min(spare_bytes, host_bytes) // slab_bytes)


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Blocking calls at once, by what they do."""

    read: int
    hash: int
    make: int

    @property
    def chunks(self) -> int:
        """Loads at once that keep all of them busy: each reader has its next one while the loop looks elsewhere."""
        return 2 * self.read + self.hash


def choose_thread_counts(cores: int) -> ThreadCounts:
    """At least what two cores take."""
    return ThreadCounts(read=_within(READS, cores), hash=_within(HASHES, cores // 2), make=_within(MAKERS, cores // 2))


def _within(bounds: tuple[int, int], count: int) -> int:
    low, high = bounds
    return min(high, max(low, count))
