"""Choose a replica for a request: the less loaded of two, or the one that holds the request's earlier state.

Without affinity, the caller draws two replicas at random (Mitzenmacher, "The power of two choices", 2001).

With affinity, this is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing
with Bounded Loads", SODA 2018). Each replica has points on a ring. A request goes to the first replica behind its own
point, and on to the next one if that has more than its share. A replica that comes or goes moves only the requests of
its own arcs. A session moves on only if its replica has no free slot, because a session has state to lose and few
requests at once.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Final

from kelvin.contracts.errors import InvalidRequest, Refused

POINTS: Final = 32  # per replica; few points are uneven, which the load bound corrects
LOAD_BOUND: Final = 1.25  # most load of a replica, relative to the mean
PREFIX_BYTES: Final = 1024  # of a prompt; recomputing a shorter prefix costs little
LONGEST_SESSION: Final = 128


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Streams that run on a replica, and its capacity."""

    running: int
    capacity: int


def is_second_less_loaded(first: Occupancy, second: Occupancy) -> bool:
    """Return whether the second replica has a smaller fraction in use. A tie returns False."""
    return second.running * first.capacity < first.running * second.capacity


@dataclass(frozen=True, slots=True)
class Affinity:
    """The key that related requests share. It contains the tenant, so two tenants never share one."""

    key: bytes
    is_session: bool


@dataclass(slots=True)
class HashRing:
    """Consistent-hash ring of replica ids."""

    _points: list[tuple[int, str]] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Add the points of a new replica."""
        for number in range(POINTS):
            insort(self._points, (_point(f"{name}/{number}".encode()), name))

    def remove(self, name: str) -> None:
        """Remove all points of a replica."""
        self._points = [each for each in self._points if each[1] != name]

    def from_key(self, key: bytes) -> Iterator[str]:
        """Yield each replica once, in the key's order of preference."""
        points, yielded = self._points, set[str]()
        start = bisect_left(points, (_point(key), ""))
        for index in chain(range(start, len(points)), range(start)):
            if (name := points[index][1]) not in yielded:
                yielded.add(name)
                yield name


def choose_replica(
    affinity: Affinity, ring: HashRing, occupancies: Mapping[str, Occupancy], free: Container[str] | None = None
) -> str | None:
    """Return the open replica with a free slot that the affinity prefers, or None if there is no free slot. `free`
    names the replicas whose slot may be taken now; None means all.
    """
    running = sum(each.running for each in occupancies.values())
    capacity = sum(each.capacity for each in occupancies.values())
    fallback = None
    for name in ring.from_key(affinity.key):
        occupancy = occupancies.get(name)
        if occupancy is None or occupancy.running >= occupancy.capacity or (free is not None and name not in free):
            continue
        if affinity.is_session or occupancy.running < LOAD_BOUND * (running + 1) * occupancy.capacity / capacity:
            return name
        fallback = fallback or name
    return fallback


def read_affinity(tenant: str, session: bytes | None, prefix: bytes | None) -> Affinity | None:
    """Return the affinity by header `x-kelvin-session`, else by the prompt's prefix. Raises Refused(InvalidRequest)."""
    if session is not None:
        return Affinity(f"session {tenant} {read_session(session)}".encode(), True)
    return None if prefix is None else Affinity(f"prefix {tenant} ".encode() + prefix, False)


def read_session(session: bytes) -> str:
    """Return the session name from the header. Raises Refused(InvalidRequest)."""
    text = session.decode("latin-1")
    if not 1 <= len(text) <= LONGEST_SESSION or not text.isascii() or not text.isprintable():
        rule = f"must be 1 to {LONGEST_SESSION} printable characters of ASCII"
        raise Refused(InvalidRequest("x-kelvin-session", repr(session[:20]), rule))
    return text


def _point(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest())
