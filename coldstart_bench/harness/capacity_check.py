"""Check whether disk and memory suffice for a run, and say how much they lack. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LARGE_BYTES: Final = (4_000_000_000, 8_000_000_000, 16_000_000_000)
LEAST_BYTES: Final = 50_000_000  # a smaller model would be mostly vocabulary
MOST_BYTES: Final = 22_000_000_000  # the largest shape of programs/make_model.py


@dataclass(frozen=True, slots=True)
class ResourceNeed:
    """Disk and memory that a run needs: multiples of the model's bytes, plus fixed bytes."""

    disk_times: float
    memory_times: float
    disk_bytes: int = 1 << 30
    memory_bytes: int = 4 << 30

    def disk(self, size_bytes: int) -> int:
        """Return the bytes needed in $TMPDIR."""
        return int(self.disk_times * size_bytes) + self.disk_bytes

    def memory(self, size_bytes: int) -> int:
        """Return the bytes of memory needed, including the page cache that must stay hot."""
        return int(self.memory_times * size_bytes) + self.memory_bytes


def parse_sizes(words: str) -> list[int]:
    """Parse sizes in GB separated by commas. Return sorted bytes. Raises ValueError with the wrong text."""
    try:
        sizes = [float(word) * 1e9 for word in words.split(",")]
    except ValueError:
        sizes = [math.nan]
    if not all(map(math.isfinite, sizes)):
        raise ValueError(f"{words}: must be numbers of GB separated by commas")
    found = sorted({int(size) for size in sizes})
    if not LEAST_BYTES <= found[0] <= found[-1] <= MOST_BYTES:
        raise ValueError(f"{words}: each must be {LEAST_BYTES / 1e9:g} to {MOST_BYTES / 1e9:g}")
    return found


def refusal(sizes_bytes: Sequence[int], need: ResourceNeed, free_disk: int, free_memory: int) -> str | None:
    """Return why the largest size can't be measured here, and the largest size that can. None if it can."""
    largest = max(sizes_bytes)
    short = find_shortage(need.disk(largest), need.memory(largest), free_disk, free_memory)
    if short is None:
        return None
    by_disk = (free_disk - need.disk_bytes) / need.disk_times
    by_memory = (free_memory - need.memory_bytes) / need.memory_times
    fits = max(0.0, min(by_disk, by_memory)) // 1e8 / 10
    return f"{largest / 1e9:g} GB: {short}; at most {fits:g} GB can be measured here"


def find_shortage(disk_bytes: int, memory_bytes: int, free_disk: int, free_memory: int) -> str | None:
    """Return what is lacking, as text. None if there is enough."""
    short = [
        f"{wanted / 1e9:.0f} GB of {what} ({free / 1e9:.0f} GB are free)"
        for what, wanted, free in (
            ("disk below $TMPDIR", disk_bytes, free_disk),
            ("memory", memory_bytes, free_memory),
        )
        if wanted > free
    ]
    return f"this takes {' and '.join(short)}" if short else None
