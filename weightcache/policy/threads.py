"""How many threads read, hash and make memory, by the cores of the machine. Pure.

Reads and hashes have threads of their own: in one pool chunks fall into step, all reading and then all hashing, and the
disk stands still meanwhile (measured on two cores: 0.75 of the plain O_DIRECT rate against 0.92).
"""

from dataclasses import dataclass
from typing import Final

READS: Final = (8, 16)  # a disk needs some four in flight, whatever the cores, while as many open or close files
HASHES: Final = (2, 8)  # 7 GB/s each, of tags four times as much: 8 are beyond any disk
MAKERS: Final = (1, 4)


@dataclass(frozen=True, slots=True)
class Threads:
    """Blocking calls at once, by what they do."""

    read: int
    hash: int
    make: int

    @property
    def chunks(self) -> int:
        """Loads at once that keep all of them busy: each reader has its next one while the loop looks elsewhere."""
        return 2 * self.read + self.hash


def threads_for(cores: int) -> Threads:
    """At least what two cores take."""
    return Threads(read=_within(READS, cores), hash=_within(HASHES, cores // 2), make=_within(MAKERS, cores // 2))


def _within(bounds: tuple[int, int], count: int) -> int:
    low, high = bounds
    return min(high, max(low, count))
