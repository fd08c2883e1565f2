"""Which replicas of a version an activator prefers, where many activators share them. Pure.

Many activators that use each replica now and then keep a connection to each, and each replica divides its streams
among all of them. So one that has fewer requests at once than there are replicas keeps to some of them as long as those
have a free slot; what belongs to a replica goes there all the same. Each replica is preferred by a few activators, and
each activator prefers as many replicas as any other.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Final

from activator.policy.places import RENEW_S

LEAST: Final = 2  # replicas of one activator: of two the less loaded is chosen
MOST: Final = 4  # activators of one replica: of more the connections cost more than they even out
SHARE: Final = 4  # parts of a replica's slots, one of which those that use little may need: one slot each


@dataclass(slots=True)
class Subset:
    """One activator's of one version, as activators and replicas come and go."""

    most: int = 0  # requests that it had at once, of late
    _is_busy: bool = False
    _judged_s: float = -inf
    _of: tuple[tuple[str, ...], Mapping[str, int], bool] | None = None

    def choose(
        self, doors: tuple[str, ...], slots: Mapping[str, int], me: str, running: int, now_s: float
    ) -> Set[str] | None:
        """Return the replicas that `me` prefers, of these with so many slots each; None if nothing has changed."""
        if now_s - self._judged_s >= RENEW_S:
            self._judged_s, self._is_busy = now_s, uses_all(self.most, len(slots))
            self.most = running
        of = (doors, slots, self._is_busy)
        if of == self._of:
            return None
        self._of = of
        return slots.keys() if self._is_busy or not slots else preferred(doors, slots, me, min(slots.values()))


def sharers(slots: int) -> int:
    """Activators that prefer a replica with so many slots."""
    return min(MOST, max(1, slots // SHARE))


def preferred(doors: Collection[str], replicas: Collection[str], me: str, slots: int) -> frozenset[str]:
    """Of the activators the one that is called `me` prefers these; all where there are few activators, or few replicas.

    By weights that are as good as drawn for each pair, the highest first (rendezvous hashing: Thaler and Ravishankar,
    "Using name-based mappings to increase hit rates", 1998), so that few change where one comes or goes: until each
    replica has one activator, then until each activator has its number, as evenly as that goes.
    """
    many = sharers(slots)
    number = max(LEAST, -(-len(replicas) * many // max(1, len(doors))))
    if me not in doors or len(doors) <= many or number >= len(replicas):
        return frozenset(replicas)
    pairs = sorted(((_weight(door, replica), door, replica) for door in doors for replica in replicas), reverse=True)
    chosen: dict[str, set[str]] = {door: set() for door in doors}
    having: Counter[str] = Counter()
    for most in (1, -(-number * len(doors) // len(replicas)), len(doors)):
        for _, door, replica in pairs:
            if having[replica] < most and len(chosen[door]) < number and replica not in chosen[door]:
                chosen[door].add(replica)
                having[replica] += 1
    return frozenset(chosen[me])


def uses_all(at_once: int, replicas: int) -> bool:
    """Whether an activator with so many requests at once goes to all replicas: each has one of them then."""
    return at_once >= replicas


def _weight(door: str, replica: str) -> bytes:
    return blake2b(f"{door}/{replica}".encode(), digest_size=8).digest()
