"""Which replica a request should go to: the less loaded of two, or the one where it meets what it left there.

Two are drawn outside (Mitzenmacher, "The power of two choices", 2001).

The other way is consistent hashing with bounded load. Each replica has points on a ring, a request goes to the first
replica behind its own point, and on to the next one where that has more than its share (Mirrokni, Thorup and
Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018). A replica that comes or goes moves the requests of
its own arcs alone. A session moves on only from a replica without a free slot: it has state to lose, and few requests
at once.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Final

from kelvin.contracts.errors import InvalidRequest, Refused

POINTS: Final = 32  # of one replica: the bound evens out what so few leave uneven
SHARE: Final = 1.25  # of the mean occupancy, at most
PREFIX_BYTES: Final = 1024  # of a prompt; what is shorter is computed anew at little cost
LONGEST_SESSION: Final = 128


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Streams running on a replica, of how many it takes."""

    running: int
    capacity: int


def less_loaded(first: Occupancy, second: Occupancy) -> bool:
    """Whether the second is the better choice: a smaller share of it is taken. Ties stay with the first."""
    return second.running * first.capacity < first.running * second.capacity


@dataclass(frozen=True, slots=True)
class Affinity:
    """What requests have in common that should meet. `key` is the tenant's own: two tenants never share one."""

    key: bytes
    is_session: bool


@dataclass(slots=True)
class HashRing:
    """Replicas by their ids."""

    _points: list[tuple[int, str]] = field(default_factory=list)

    def add(self, name: str) -> None:
        """It was not there."""
        for number in range(POINTS):
            insort(self._points, (_point(f"{name}/{number}".encode()), name))

    def remove(self, name: str) -> None:
        """It was."""
        self._points = [each for each in self._points if each[1] != name]

    def from_key(self, key: bytes) -> Iterator[str]:
        """Each replica once, in the order in which the key prefers them."""
        points, seen = self._points, set[str]()
        start = bisect_left(points, (_point(key), ""))
        for at in chain(range(start, len(points)), range(start)):
            if (name := points[at][1]) not in seen:
                seen.add(name)
                yield name


def choose(
    affinity: Affinity, ring: HashRing, open_ones: Mapping[str, Occupancy], free: Container[str] | None = None
) -> str | None:
    """The replica, with a free slot, of those that take requests; None where none has one. `free`: those that have one
    which may be taken now, where that is not all of them.
    """
    running = sum(each.running for each in open_ones.values())
    capacity = sum(each.capacity for each in open_ones.values())
    later = None
    for name in ring.from_key(affinity.key):
        one = open_ones.get(name)
        if one is None or one.running >= one.capacity or (free is not None and name not in free):
            continue
        if affinity.is_session or one.running < SHARE * (running + 1) * one.capacity / capacity:
            return name
        later = later or name
    return later


def read_affinity(tenant: str, session: bytes | None, prefix: bytes | None) -> Affinity | None:
    """By the header `x-kelvin-session`, else by the prompt's beginning. Raises Refused(InvalidRequest)."""
    if session is not None:
        return Affinity(f"session {tenant} {read_session(session)}".encode(), True)
    return None if prefix is None else Affinity(f"prefix {tenant} ".encode() + prefix, False)


def read_session(session: bytes) -> str:
    """A session's name. Raises Refused(InvalidRequest)."""
    text = session.decode("latin-1")
    if not 1 <= len(text) <= LONGEST_SESSION or not text.isascii() or not text.isprintable():
        rule = f"must be 1 to {LONGEST_SESSION} printable characters of ASCII"
        raise Refused(InvalidRequest("x-kelvin-session", repr(session[:20]), rule))
    return text


def _point(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest())
