"""Count bytes that were prefetched for expected requests, and whether they were leased or evicted unused."""

from weightcache.counters import Counters

Key = tuple[str, str]  # tenant, version


class Foreseen:
    """Prefetched bytes by version, from their arrival until the first lease or their eviction."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._waiting: dict[Key, int] = {}

    def __repr__(self) -> str:
        return f"<Foreseen versions={len(self._waiting)}>"

    def brought(self, key: Key, nbytes: int) -> None:
        """Record bytes that were not in memory before this prefetch."""
        if nbytes:
            self._counters.foreseen_bytes["brought"] += nbytes
            self._waiting[key] = self._waiting.get(key, 0) + nbytes

    def leased(self, key: Key) -> None:
        """Record that the version was leased."""
        self._settle(key, "leased")

    def gone(self, key: Key) -> None:
        """Record that the version was evicted unused."""
        self._settle(key, "gone")

    def _settle(self, key: Key, outcome: str) -> None:
        if (nbytes := self._waiting.pop(key, None)) is not None:
            self._counters.foreseen_bytes[outcome] += nbytes
