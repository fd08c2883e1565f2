"""Divide a replica's streams among the activators that send it requests.

Only the replica knows its limit: it refuses a request beyond it, and the activator sends that request again later. To
keep refusals few, the replica tells each activator its credit, the number of streams that it may have at once: its
max-min fair part (Bertsekas and Gallager, "Data Networks", 1992). Of the other activators it counts what they said they
want with their last request; the asking one counts as wanting all streams. So an activator that is busy alone has all
streams from its first answer on.

No activator starves, even with more activators than streams. One that has nothing inside and is refused gets a claim.
Streams that come free are kept for claims, oldest first, before any activator gets a second stream. A claim ends when
its activator doesn't ask again within `CLAIM_TTL_S`.

Pure state; times are monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

DEMAND_TTL_S: Final = 2.0  # for which a want stands that is not said again
CLAIM_TTL_S: Final = (
    1.0  # longer than an activator waits before it asks again (`activator/queue/policy/replica_credit.py`)
)
ROTATION_S: Final = 2.0  # for which streams that don't divide stay with the same activators


@dataclass(slots=True)
class _Activator:
    """`wanted_streams` is how many requests it would have inside, as it said last."""

    inside: int = 0
    wanted_streams: int = 0
    last_request_s: float = -inf

    def current_demand(self, now_s: float) -> int:
        return max(self.inside, self.wanted_streams if now_s - self.last_request_s < DEMAND_TTL_S else 0)


@dataclass(slots=True)
class Credits:
    """The division of one replica, which takes `streams` requests at once."""

    streams: int
    inside: int = 0  # requests of all activators
    _known: dict[str, _Activator] = field(default_factory=dict)  # in the order in which they came
    _claims: dict[str, float] = field(default_factory=dict)  # until when, oldest first

    def try_enter(self, name: str, wanted_streams: int, now_s: float) -> bool:
        """Let a request of this activator in, or return False. `wanted_streams` includes it. Each that enters
        must `leave`.
        """
        self._forget(now_s)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Activator()
        known.wanted_streams, known.last_request_s = wanted_streams, now_s
        if self.inside + self._kept_for_others(name, known) < self.streams:
            self._enter(name, known)
            return True
        if not known.inside:
            self._claims[name] = now_s + CLAIM_TTL_S  # one that has a claim keeps its place
        return False

    def enter(self, name: str, now_s: float) -> None:
        """Let a request in, full or not: its activator is of a build that knows no credit."""
        self._forget(now_s)
        known = self._known.setdefault(name, _Activator())
        known.last_request_s = now_s
        self._enter(name, known)

    def leave(self, name: str) -> None:
        """A request has ended."""
        self._known[name].inside -= 1
        self.inside -= 1

    def credit_of(self, name: str, now_s: float) -> int:
        """Return how many requests the activator may have inside: one at least."""
        if len(self._known) <= 1:
            return self.streams
        wanted_streams = [
            self.streams if each == name else known.current_demand(now_s) for each, known in self._known.items()
        ]
        return max(1, fair_share(self.streams, wanted_streams, list(self._known).index(name), int(now_s / ROTATION_S)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts add up and activators with a claim have nothing inside."""
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
        """Drop claims that are over, and activators that have nothing inside and want nothing."""
        for name in [name for name, until_s in self._claims.items() if now_s >= until_s]:
            del self._claims[name]
        if len(self._known) > 1:
            for name in [name for name, known in self._known.items() if not known.current_demand(now_s)]:
                del self._known[name]


def fair_share(streams: int, wanted_streams: Sequence[int], index: int, turn: int) -> int:
    """Return the max-min fair part of the one at `index`. Streams that don't divide go round with `turn`.

    8 streams and wants of 1, 6 and 9: the first has 1, and the others share 7: 4 and 3, in the next turn 3 and 4.
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
    above = [at for at, want in enumerate(wanted_streams) if want > level]
    return level + int((above.index(index) + turn) % sharers < odd)
