"""Who waits for which chunks. The one account of it: every source's shares go by it. Pure."""

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

Flow = Hashable  # one who waits for a version, for as long as they wait
Key = tuple[str, str]  # tenant, digest

_NOBODY: Final[Mapping[Flow, int]] = MappingProxyType({})


class Wants:
    """Both ways round: the chunks of a flow, the flows of a chunk."""

    def __init__(self) -> None:
        self._by_flow: dict[Flow, Mapping[Key, int]] = {}
        self._by_key: dict[Key, dict[Flow, int]] = {}

    def __repr__(self) -> str:
        return f"<Wants flows={len(self._by_flow)} chunks={len(self._by_key)}>"

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._by_flow

    def enter(self, flow: Flow, wanted: Mapping[Key, int]) -> None:
        """It waits for these chunks, in the order of their positions, until `leave`."""
        assert flow not in self._by_flow
        self._by_flow[flow] = wanted
        for key, position in wanted.items():
            self._by_key.setdefault(key, {})[flow] = position

    def leave(self, flow: Flow) -> None:
        """It waits no more."""
        for key in self._by_flow.pop(flow):
            flows = self._by_key[key]
            del flows[flow]
            if not flows:
                del self._by_key[key]

    def by(self, flow: Flow) -> Mapping[Key, int]:
        """Positions by chunk."""
        return self._by_flow[flow]

    def of(self, key: Key) -> Mapping[Flow, int]:
        """Positions by flow; empty where nobody wants it."""
        return self._by_key.get(key, _NOBODY)


def by_position(digests: Iterable[str], tenant: str) -> dict[Key, int]:
    """Chunks in the order of their version's linear space, by that order."""
    return {(tenant, digest): position for position, digest in enumerate(digests)}
