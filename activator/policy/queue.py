"""A first-in-first-out queue bounded in entries and bytes, alone and together with its siblings. Pure state."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bound:
    """How much may wait."""

    entries: int
    nbytes: int


@dataclass(slots=True)
class Load:
    """How much waits, in one queue or in all together."""

    entries: int = 0
    nbytes: int = 0

    def fits(self, nbytes: int, bound: Bound) -> bool:
        """Whether one more entry of that size may wait."""
        return self.entries < bound.entries and self.nbytes + nbytes <= bound.nbytes


@dataclass(slots=True)
class Fifo(Generic[T]):
    """Entries in order of arrival, each with its bytes; whether one fits is `admission`'s to say. All steps O(1)."""

    shared: Load  # of all queues together
    own: Load = field(default_factory=Load)
    _entries: dict[T, int] = field(default_factory=dict)  # insertion-ordered

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: T, nbytes: int) -> None:
        """At the end. An entry waits at most once."""
        assert entry not in self._entries
        self._entries[entry] = nbytes
        self._count(1, nbytes)

    def take(self) -> T:
        """The first. Raises StopIteration where nobody waits: look first."""
        entry = next(iter(self._entries))
        self._count(-1, -self._entries.pop(entry))
        return entry

    def discard(self, entry: T) -> bool:
        """Take it out wherever it stands; whether it was waiting."""
        nbytes = self._entries.pop(entry, None)
        if nbytes is None:
            return False
        self._count(-1, -nbytes)
        return True

    def check_integrity(self) -> None:
        """The load is what waits, and no more than all queues' load."""
        assert self.own.entries == len(self._entries)
        assert self.own.nbytes == sum(self._entries.values())
        assert self.own.entries <= self.shared.entries
        assert self.own.nbytes <= self.shared.nbytes

    def _count(self, entries: int, nbytes: int) -> None:
        self.own.entries += entries
        self.own.nbytes += nbytes
        self.shared.entries += entries
        self.shared.nbytes += nbytes
