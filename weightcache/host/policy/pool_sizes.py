"""Decide how many threads read, hash and make slabs, and how many slabs are made in advance. Pure.

Slabs are made in advance, within the budget, so that a restore finds memory ready.

Reads and hashes have separate threads. In a shared pool, chunks fall into step: all read, then all hash, and the disk
idles meanwhile (measured on two cores: 0.75 of the plain O_DIRECT rate against 0.92).
"""

from dataclasses import dataclass
from typing import Final

# A disk needs about four reads in flight, on any number of cores, while as many threads open or close files
READS: Final = (8, 16)
HASHES: Final = (2, 8)  # 8 GB/s each, 27 GB/s with tags: 8 threads exceed any disk
MAKERS: Final = (1, 4)


@dataclass(frozen=True, slots=True)
class SlabCounts:
    """Slabs by state, and the number of waiting callers."""

    used: int
    free: int
    being_made: int
    waiting: int


def slabs_to_make(slab_counts: SlabCounts, limit: int, spare: int, at_once: int) -> int:
    """Return how many more slabs to start making. For waiting callers, as many are made at once as possible. Spare
    slabs are made one after another, so that they take at most one core from other work.
    """
    headroom = limit - slab_counts.used - slab_counts.free - slab_counts.being_made
    missing = slab_counts.waiting - slab_counts.free - slab_counts.being_made
    if slab_counts.waiting:
        return max(0, min(missing, headroom, at_once - slab_counts.being_made))
    return max(0, min(1 - slab_counts.being_made, spare - slab_counts.free, headroom))


def spare_slabs(host_bytes: int, slab_bytes: int, spare_bytes: int) -> int:
    """Return how many slabs are kept ready: at least one, at most the budget's."""
    return max(1, min(spare_bytes, host_bytes) // slab_bytes)


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Numbers of threads for blocking calls."""

    read: int
    hash: int
    make: int

    @property
    def loads_at_once(self) -> int:
        """Return how many loads at once keep all threads busy: each reader has its next chunk queued."""
        return 2 * self.read + self.hash


def choose_thread_counts(cores: int) -> ThreadCounts:
    """Return the numbers of threads for so many cores. They are never below those for two cores."""
    return ThreadCounts(read=_clamp(READS, cores), hash=_clamp(HASHES, cores // 2), make=_clamp(MAKERS, cores // 2))


def _clamp(bounds: tuple[int, int], count: int) -> int:
    low, high = bounds
    return min(high, max(low, count))
