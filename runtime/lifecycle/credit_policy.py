"""Divide a replica's streams among the activators that send it requests.

The replica refuses requests beyond its limit, and the activator retries them later. To keep refusals few, the replica
tells each activator its credit: the number of streams that it may use at once. The credit is a max-min fair share
(Bertsekas and Gallager, "Data Networks", 1992). Each other activator counts with the streams that it wanted in its last
request. The receiving activator counts as wanting all streams, so a lone activator gets all of them at once.

No activator starves, even if there are more activators than streams. An activator without a stream that is refused gets
a claim. Free streams are kept for claims, oldest first, before any activator gets a second stream. A claim expires if
its activator doesn't retry within `CLAIM_TTL_S`.

Pure state; times are monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

DEMAND_TTL_S: Final = 2.0  # how long an activator's wanted streams count after its last request
CLAIM_TTL_S: Final = 1.0  # longer than an activator's retry delay (`activator/queue/policy/replica_credit.py`)
ROTATION_S: Final = 2.0  # how long the streams that don't divide evenly stay with the same activators


@dataclass(slots=True)
class _Activator:
    """One activator. `wanted_streams` is how many requests it wants to have here, as of its last request."""

    inside: int = 0
    wanted_streams: int = 0
    last_request_s: float = -inf

    def current_demand(self, now_s: float) -> int:
        return max(self.inside, self.wanted_streams if now_s - self.last_request_s < DEMAND_TTL_S else 0)


@dataclass(slots=True)
class Credits:
    """The streams of one replica, which accepts `streams` requests at once, divided among activators."""

    streams: int
    inside: int = 0  # requests of all activators
    _known: dict[str, _Activator] = field(default_factory=dict)  # in order of their first requests
    _claims: dict[str, float] = field(default_factory=dict)  # the expiry time of each, oldest first

    def try_enter(self, name: str, wanted_streams: int, now_s: float) -> bool:
        """Admit a request of this activator, or return False. `wanted_streams` includes it. `leave` must follow."""
        self._forget(now_s)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Activator()
        known.wanted_streams, known.last_request_s = wanted_streams, now_s
        if self.inside + self._kept_for_others(name, known) < self.streams:
            self._enter(name, known)
            return True
        if not known.inside:
            self._claims[name] = now_s + CLAIM_TTL_S  # an existing claim keeps its position in the dict
        return False

    def enter(self, name: str, now_s: float) -> None:
        """Admit a request even if the replica is full. For activators of a build that does not know credits."""
        self._forget(now_s)
        known = self._known.setdefault(name, _Activator())
        known.last_request_s = now_s
        self._enter(name, known)

    def leave(self, name: str) -> None:
        """Return the stream of a request that has ended."""
        self._known[name].inside -= 1
        self.inside -= 1

    def credit_of(self, name: str, now_s: float) -> int:
        """Return how many requests the activator may have here: at least one."""
        if len(self._known) <= 1:
            return self.streams
        wanted_streams = [
            self.streams if each == name else known.current_demand(now_s) for each, known in self._known.items()
        ]
        return max(1, fair_share(self.streams, wanted_streams, list(self._known).index(name), int(now_s / ROTATION_S)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts add up and activators with a claim have no stream."""
        assert self.inside == sum(known.inside for known in self._known.values())
        assert all(known.inside >= 0 for known in self._known.values())
        assert all(not self._known[name].inside for name in self._claims)

    def _enter(self, name: str, known: _Activator) -> None:
        self._claims.pop(name, None)
        known.inside += 1
        self.inside += 1

    def _kept_for_others(self, name: str, known: _Activator) -> int:
        """Return how many streams are kept for claims that come before this activator."""
        if known.inside or name not in self._claims:
            return len(self._claims)
        return list(self._claims).index(name)

    def _forget(self, now_s: float) -> None:
        """Drop expired claims, and activators that have no stream and want none."""
        for name in [name for name, until_s in self._claims.items() if now_s >= until_s]:
            del self._claims[name]
        if len(self._known) > 1:
            for name in [name for name, known in self._known.items() if not known.current_demand(now_s)]:
                del self._known[name]


def fair_share(streams: int, wanted_streams: Sequence[int], index: int, turn: int) -> int:
    """Return the max-min fair share of the activator at `index`. Remainder streams rotate with `turn`.

    Example: activators that want 1, 6 and 9 of 8 streams get 1, 4 and 3, and in the next turn 1, 3 and 4.
    """
    left, sharers = streams, len(wanted_streams)
    for want in sorted(wanted_streams):
        if want * sharers > left:
            break
        left -= want
        sharers -= 1
    if not sharers:
        return wanted_streams[index]
    level, odd = divmod(left, sharers)
    if wanted_streams[index] <= level:
        return wanted_streams[index]
    above = [position for position, want in enumerate(wanted_streams) if want > level]
    return level + int((above.index(index) + turn) % sharers < odd)
