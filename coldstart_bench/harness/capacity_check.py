"""Is there room for a run: how much disk and memory a model of a size takes, and a refusal that says both. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LARGE_BYTES: Final = (4_000_000_000, 8_000_000_000, 16_000_000_000)
LEAST_BYTES: Final = 50_000_000  # below, the shape of the model is all vocabulary
MOST_BYTES: Final = 22_000_000_000  # above, loaders/make_model.py has no shape


@dataclass(frozen=True, slots=True)
class ResourceNeed:
    """In multiples of the model's bytes, and beside them."""

    disk_times: float
    memory_times: float
    disk_bytes: int = 1 << 30
    memory_bytes: int = 4 << 30

    def disk(self, size_bytes: int) -> int:
        """Bytes below $TMPDIR."""
        return int(self.disk_times * size_bytes) + self.disk_bytes

    def memory(self, size_bytes: int) -> int:
        """Bytes, the page cache that must stay hot among them."""
        return int(self.memory_times * size_bytes) + self.memory_bytes


def parse_sizes(words: str) -> list[int]:
    """Bytes, from GB separated by commas, in order. Raises ValueError naming what is none."""
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
    """Why the largest size can't be measured here, and the largest that can; None where there is room."""
    largest = max(sizes_bytes)
    short = find_shortage(need.disk(largest), need.memory(largest), free_disk, free_memory)
    if short is None:
        return None
    by_disk = (free_disk - need.disk_bytes) / need.disk_times
    by_memory = (free_memory - need.memory_bytes) / need.memory_times
    fits = max(0.0, min(by_disk, by_memory)) // 1e8 / 10
    return f"{largest / 1e9:g} GB: {short}; at most {fits:g} GB can be measured here"


def find_shortage(disk_bytes: int, memory_bytes: int, free_disk: int, free_memory: int) -> str | None:
    """Why that can't be measured here; None where there is room."""
    short = [
        f"{wanted / 1e9:.0f} GB of {what} ({free / 1e9:.0f} GB are free)"
        for what, wanted, free in (
            ("disk below $TMPDIR", disk_bytes, free_disk),
            ("memory", memory_bytes, free_memory),
        )
        if wanted > free
    ]
    return f"this takes {' and '.join(short)}" if short else None
