"""Which one-time tokens were used, until each would have expired anyway. Bounded: a full one takes no more."""

import heapq
from typing import Final

MOST: Final = 65_536


class Spent:
    """Names of tokens (issuer and `jti`). Times are seconds of 1970."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._names: set[tuple[str, str]] = set()
        self._ends: list[tuple[float, tuple[str, str]]] = []  # a heap

    def __repr__(self) -> str:
        return f"<Spent {len(self._names)}/{self._most}>"

    def has(self, name: tuple[str, str]) -> bool:
        """Whether it was spent."""
        return name in self._names

    def is_full(self, now_s: float) -> bool:
        """Whether there is no room, what has expired being forgotten."""
        while self._ends and self._ends[0][0] <= now_s:
            self._names.discard(heapq.heappop(self._ends)[1])
        return len(self._names) >= self._most

    def spend(self, name: tuple[str, str], until_s: float) -> None:
        """Remember it until then. It is not spent yet, and there is room."""
        assert name not in self._names
        assert len(self._names) < self._most
        self._names.add(name)
        heapq.heappush(self._ends, (until_s, name))

    def check_integrity(self) -> None:
        """Bounded, and each name has one end."""
        assert len(self._names) <= self._most
        assert sorted(name for _, name in self._ends) == sorted(self._names)
