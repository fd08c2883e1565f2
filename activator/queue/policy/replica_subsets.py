"""Which replicas of a version an activator prefers, where many activators share them. Pure.

If each of many activators used every replica now and then, each would keep a connection to every replica, and each
replica would divide its streams among all activators. So an activator with fewer requests at once than there are
replicas prefers some of them, as long as those have a free slot. A request that belongs to a replica goes there all the
same. Each replica is preferred by a few activators, and all activators prefer equally many replicas.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Final

REVIEW_S: Final = 1.0  # between two looks at how much an activator uses
MIN_REPLICAS: Final = 2  # replicas of one activator: of two the less loaded is chosen
MAX_ACTIVATORS: Final = 4  # activators of one replica: of more the connections cost more than they even out
SHARE: Final = 4  # parts of a replica's slots, one of which those that use little may need: one slot each


@dataclass(slots=True)
class ReplicaSubset:
    """The replicas of one version that one activator prefers, as activators and replicas come and go."""

    most: int = 0  # requests that it had at once, of late
    _is_busy: bool = False
    _judged_s: float = -inf
    _of: tuple[tuple[str, ...], Mapping[str, int], bool] | None = None

    def choose(
        self, activators: tuple[str, ...], slots: Mapping[str, int], own_name: str, running: int, now_s: float
    ) -> Set[str] | None:
        """Return which replicas the activator `own_name` prefers; None if nothing has changed. `slots` has
        each replica's.
        """
        if now_s - self._judged_s >= REVIEW_S:
            self._judged_s, self._is_busy = now_s, uses_all(self.most, len(slots))
            self.most = running
        of = (activators, slots, self._is_busy)
        if of == self._of:
            return None
        self._of = of
        return (
            slots.keys()
            if self._is_busy or not slots
            else preferred_replicas(activators, slots, own_name, min(slots.values()))
        )


def sharers(slots: int) -> int:
    """Activators that prefer a replica with so many slots."""
    return min(MAX_ACTIVATORS, max(1, slots // SHARE))


def preferred_replicas(
    activators: Collection[str], replicas: Collection[str], own_name: str, slots: int
) -> frozenset[str]:
    """Return the replicas that the activator `own_name` prefers: all if there are few activators or few replicas.

    Each pair of activator and replica has a weight, a hash of both names (rendezvous hashing: Thaler and Ravishankar,
    "Using name-based mappings to increase hit rates", 1998), so few pairs change when one comes or goes. Pairs are
    taken by weight, highest first: until each replica has one activator, then until each activator has its number, as
    evenly as that goes.
    """
    many = sharers(slots)
    number = max(MIN_REPLICAS, -(-len(replicas) * many // max(1, len(activators))))
    if own_name not in activators or len(activators) <= many or number >= len(replicas):
        return frozenset(replicas)
    pairs = sorted(
        ((_weight(door, replica), door, replica) for door in activators for replica in replicas), reverse=True
    )
    chosen: dict[str, set[str]] = {door: set() for door in activators}
    having: Counter[str] = Counter()
    for most in (1, -(-number * len(activators) // len(replicas)), len(activators)):
        for _, door, replica in pairs:
            if having[replica] < most and len(chosen[door]) < number and replica not in chosen[door]:
                chosen[door].add(replica)
                having[replica] += 1
    return frozenset(chosen[own_name])


def uses_all(at_once: int, replicas: int) -> bool:
    """Whether an activator with so many requests at once goes to all replicas: each has one of them then."""
    return at_once >= replicas


def _weight(door: str, replica: str) -> bytes:
    return blake2b(f"{door}/{replica}".encode(), digest_size=8).digest()
