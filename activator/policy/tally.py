"""Tokens by the deadline of who asks for them: how many have less time than one, without a look at each. Pure state.

A tree of sixteen branches: sums by the sixteenth of a second, the second, sixteen seconds, and so on.
"""

from dataclasses import dataclass, field
from typing import Final

FINEST: Final = 16  # a second has so many; who has the same sixteenth is not before
LEVELS: Final = 4  # the coarsest is 256 s, of which there are few: a deadline is not days away


def _levels() -> tuple[dict[int, int], ...]:
    return tuple({} for _ in range(LEVELS))


@dataclass(slots=True)
class Tally:
    """Deadlines are seconds on any clock. Adding and asking take the same time however much waits."""

    _sums: tuple[dict[int, int], ...] = field(default_factory=_levels)

    def add(self, deadline_s: float, tokens: int) -> None:
        """So many more; fewer where that is below 0."""
        index = int(deadline_s * FINEST)
        for sums in self._sums:
            left = sums.get(index, 0) + tokens
            if left:
                sums[index] = left
            else:
                sums.pop(index, None)
            index >>= 4

    def before(self, deadline_s: float) -> int:
        """Tokens of those with less time, never more than there are."""
        index, found = int(deadline_s * FINEST), 0
        for sums in self._sums[:-1]:
            for each in range(index & ~15, index) if sums else ():
                found += sums.get(each, 0)
            index >>= 4
        return found + sum(tokens for each, tokens in self._sums[-1].items() if each < index)

    def total(self) -> int:
        """Tokens of all."""
        return sum(self._sums[-1].values())
