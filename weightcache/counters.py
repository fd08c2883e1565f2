"""What the agent counted since it started, for operators and for tests that count reads. One writer: the event loop."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """By tier where the name says so."""

    chunk_reads: Counter[str] = field(default_factory=Counter)
    bytes_read: Counter[str] = field(default_factory=Counter)
    corrupt_chunks: Counter[str] = field(default_factory=Counter)
    missing_chunks: int = 0
    admitted_chunks: int = 0
    unadmitted_chunks: int = 0
    leases_granted: int = 0
    leases_hot: int = 0
    leases_refused: Counter[str] = field(default_factory=Counter)

    def read(self, tier: str, length: int) -> None:
        """A chunk was read from `tier`, whatever it turned out to be."""
        self.chunk_reads[tier] += 1
        self.bytes_read[tier] += length
