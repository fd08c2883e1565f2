"""Divide a replica's streams among the activators that send it requests.

The replica refuses requests beyond its limit, and the activator retries them later. To keep refusals few, the replica
tells each activator its credit: the number of streams that it may use at once. The credit is a max-min fair share
(Bertsekas and Gallager, "Data Networks", 1992). Each other activator counts with the streams that it wanted in its last
request. The receiving activator counts as wanting all streams, so a lone activator gets all of them at once.

No activator starves, even if there are more activators than streams. An activator without a stream that is refused gets
a claim. Free streams are reserved for claims, oldest first, before any activator gets a second stream. A claim expires
if its activator doesn't retry within `CLAIM_TTL_S`.

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
class _ActivatorState:
    """One activator. `wanted_streams` is how many requests it wants to have here, as of its last request."""

    active_requests: int = 0
    wanted_streams: int = 0
    last_request_s: float = -inf

    def current_demand(self, now_s: float) -> int:
        return max(self.active_requests, self.wanted_streams if now_s - self.last_request_s < DEMAND_TTL_S else 0)


@dataclass(slots=True)
class Credits:
    """The streams of one replica, which accepts `streams` requests at once, divided among activators."""

    streams: int
    active_requests: int = 0  # requests of all activators
    _activators: dict[str, _ActivatorState] = field(default_factory=dict)  # in order of their first requests
    _claims: dict[str, float] = field(default_factory=dict)  # the expiry time of each, oldest first

    def try_enter(self, activator: str, wanted_streams: int, now_s: float) -> bool:
        """Admit a request of this activator, or return False. `wanted_streams` includes it. `leave` must follow."""
        self._expire(now_s)
        state = self._activators.setdefault(activator, _ActivatorState())
        state.wanted_streams, state.last_request_s = wanted_streams, now_s
        if self.active_requests + self._reserved_streams(activator, state) < self.streams:
            self._enter(activator, state)
            return True
        if not state.active_requests:
            self._claims[activator] = now_s + CLAIM_TTL_S  # an existing claim keeps its position in the dict
        return False

    def enter(self, activator: str, now_s: float) -> None:
        """Admit a request even if the replica is full. For activators of a build that does not know credits."""
        self._expire(now_s)
        state = self._activators.setdefault(activator, _ActivatorState())
        state.last_request_s = now_s
        self._enter(activator, state)

    def leave(self, activator: str) -> None:
        """Return the stream of a request that has ended."""
        self._activators[activator].active_requests -= 1
        self.active_requests -= 1

    def credit_of(self, activator: str, now_s: float) -> int:
        """Return how many requests the activator may have here: at least one."""
        if len(self._activators) <= 1:
            return self.streams
        demands = {name: state.current_demand(now_s) for name, state in self._activators.items()}
        demands[activator] = self.streams
        index, rotation = list(demands).index(activator), int(now_s / ROTATION_S)
        return max(1, fair_share(self.streams, list(demands.values()), index, rotation))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts add up and activators with a claim have no stream."""
        assert self.active_requests == sum(state.active_requests for state in self._activators.values())
        assert all(state.active_requests >= 0 for state in self._activators.values())
        assert all(not self._activators[name].active_requests for name in self._claims)

    def _enter(self, activator: str, state: _ActivatorState) -> None:
        self._claims.pop(activator, None)
        state.active_requests += 1
        self.active_requests += 1

    def _reserved_streams(self, activator: str, state: _ActivatorState) -> int:
        """Return how many streams are reserved for claims that come before this activator."""
        if state.active_requests or activator not in self._claims:
            return len(self._claims)
        return list(self._claims).index(activator)

    def _expire(self, now_s: float) -> None:
        """Drop expired claims, and activators that have no stream and want none."""
        for name in [name for name, expires_at_s in self._claims.items() if now_s >= expires_at_s]:
            del self._claims[name]
        if len(self._activators) > 1:
            for name in [name for name, state in self._activators.items() if not state.current_demand(now_s)]:
                del self._activators[name]


def fair_share(streams: int, wanted_streams: Sequence[int], index: int, rotation: int) -> int:
    """Return the max-min fair share of the activator at `index`. Remainder streams rotate with `rotation`.

    Example: activators that want 1, 6 and 9 of 8 streams get 1, 4 and 3, and in the next rotation 1, 3 and 4.
    """
    left, sharers = streams, len(wanted_streams)
    for want in sorted(wanted_streams):
        if want * sharers > left:
            break
        left -= want
        sharers -= 1
    if not sharers:
        return wanted_streams[index]
    level, remainder = divmod(left, sharers)
    if wanted_streams[index] <= level:
        return wanted_streams[index]
    above = [position for position, want in enumerate(wanted_streams) if want > level]
    return level + int((above.index(index) + rotation) % sharers < remainder)
