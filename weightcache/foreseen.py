"""What was brought for versions that were only expected, and what became of it: leased, or gone before anybody came."""

from weightcache.counters import Counters

Key = tuple[str, str]  # tenant, version


class Foreseen:
    """Bytes by version, from their arrival until the first lease or the end of their place."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._waiting: dict[Key, int] = {}

    def __repr__(self) -> str:
        return f"<Foreseen versions={len(self._waiting)}>"

    def brought(self, key: Key, nbytes: int) -> None:
        """So many bytes of it were not in memory, and are."""
        if nbytes:
            self._counters.foreseen_bytes["brought"] += nbytes
            self._waiting[key] = self._waiting.get(key, 0) + nbytes

    def leased(self, key: Key) -> None:
        """Somebody came."""
        self._settle(key, "leased")

    def gone(self, key: Key) -> None:
        """Its place was needed, or nobody wants it kept."""
        self._settle(key, "gone")

    def _settle(self, key: Key, outcome: str) -> None:
        if (nbytes := self._waiting.pop(key, None)) is not None:
            self._counters.foreseen_bytes[outcome] += nbytes
