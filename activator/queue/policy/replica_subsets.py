"""Choose which replicas of a version an activator prefers, when many activators share them. Pure.

If each of many activators used every replica now and then, each would keep a connection to every replica, and each
replica would divide its streams among all activators. So an activator that has fewer concurrent requests than there are
replicas prefers some replicas while those have a free slot. A request with an affinity still goes to its own replica.
Each replica is preferred by a few activators, and all activators prefer equally many replicas.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Final

REVIEW_S: Final = 1.0  # interval between reviews of how much an activator uses
MIN_REPLICAS: Final = 2  # per activator: with two, the less loaded can be chosen
MAX_ACTIVATORS: Final = 4  # per replica: above that, connections cost more than a better balance saves
SLOTS_PER_ACTIVATOR: Final = 4  # slots per activator: one activator prefers a replica for every four of its slots


@dataclass(slots=True)
class ReplicaSubset:
    """The replicas of one version that this activator prefers, as activators and replicas come and go."""

    peak_running: int = 0  # highest recent number of concurrent requests
    _is_busy: bool = False
    _reviewed_s: float = -inf
    _inputs: tuple[tuple[str, ...], Mapping[str, int], bool] | None = None

    def choose(
        self, activators: tuple[str, ...], slots: Mapping[str, int], own_name: str, running: int, now_s: float
    ) -> Set[str] | None:
        """Return the replicas that `own_name` prefers; None if nothing changed. `slots` maps each replica to
        its slots.
        """
        if now_s - self._reviewed_s >= REVIEW_S:
            self._reviewed_s, self._is_busy = now_s, uses_all(self.peak_running, len(slots))
            self.peak_running = running
        inputs = (activators, slots, self._is_busy)
        if inputs == self._inputs:
            return None
        self._inputs = inputs
        return (
            slots.keys()
            if self._is_busy or not slots
            else preferred_replicas(activators, slots, own_name, min(slots.values()))
        )


def activators_per_replica(slots: int) -> int:
    """Return how many activators prefer a replica with `slots` slots."""
    return min(MAX_ACTIVATORS, max(1, slots // SLOTS_PER_ACTIVATOR))


def preferred_replicas(
    activators: Collection[str], replicas: Collection[str], own_name: str, slots: int
) -> frozenset[str]:
    """Return the replicas that the activator `own_name` prefers: all if there are few activators or few replicas.

    Uses rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998). Each pair
    of activator and replica has a weight, a hash of both names, so few pairs change when one of them comes or goes.
    Pairs are taken by descending weight: first until each replica has one activator, then until each activator has its
    number of replicas, as evenly as possible.
    """
    many = activators_per_replica(slots)
    number = max(MIN_REPLICAS, -(-len(replicas) * many // max(1, len(activators))))
    if own_name not in activators or len(activators) <= many or number >= len(replicas):
        return frozenset(replicas)
    pairs = sorted(
        ((_weight(activator, replica), activator, replica) for activator in activators for replica in replicas),
        reverse=True,
    )
    chosen: dict[str, set[str]] = {activator: set() for activator in activators}
    having: Counter[str] = Counter()
    for most in (1, -(-number * len(activators) // len(replicas)), len(activators)):
        for _, activator, replica in pairs:
            if having[replica] < most and len(chosen[activator]) < number and replica not in chosen[activator]:
                chosen[activator].add(replica)
                having[replica] += 1
    return frozenset(chosen[own_name])


def uses_all(running: int, replicas: int) -> bool:
    """Return whether an activator with `running` concurrent requests uses all replicas: at least one for each."""
    return running >= replicas


def _weight(activator: str, replica: str) -> bytes:
    return blake2b(f"{activator}/{replica}".encode(), digest_size=8).digest()
