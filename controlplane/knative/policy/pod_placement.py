"""Which version may run on a pod that anybody's may run on, and on which of those that wait. Pure.

A pod holds one version, so packing is the choice of the smallest pod that has room: a large one is kept for what fits
nowhere else.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

WILDCARD: Final = "*"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Pods of one kind: room for a version's weights, how many wait at least, and how many there are at most."""

    name: str
    weight_bytes: int
    waiting: int
    most: int


@dataclass(frozen=True, slots=True)
class FreePod:
    """A pod that waits. `since_us`: from when on."""

    pod: str
    weight_bytes: int
    since_us: int


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """Whose versions share pods: `models` are TENANT/MODEL, each part a name or *; never those of tenants that are
    `excluded_tenants`, which have processes on pods of their own.
    """

    models: tuple[str, ...] = ()
    excluded_tenants: frozenset[str] = frozenset()

    def is_pooled(self, tenant: str, model: str) -> bool:
        """Whether the model's versions do."""
        if tenant in self.excluded_tenants:
            return False
        return any(_fits(pattern, tenant, model) for pattern in self.models)


def pool_for(weight_bytes: int, pools: Iterable[PoolSpec]) -> PoolSpec | None:
    """The one whose pods have the least room that is enough; None where none has."""
    found = (each for each in pools if each.weight_bytes >= weight_bytes)
    return min(found, key=lambda each: (each.weight_bytes, each.name), default=None)


def choose_pod(weight_bytes: int, waiting: Iterable[FreePod]) -> FreePod | None:
    """The best fit, of equals the one that has waited for longest; None where none has room."""
    found = (each for each in waiting if each.weight_bytes >= weight_bytes)
    return min(found, key=lambda each: (each.weight_bytes, each.since_us, each.pod), default=None)


def pool_concurrency(pools: Collection[PoolSpec], taken: Mapping[str, int], asked: Mapping[str, int]) -> dict[str, int]:
    """By pool what its autoscaler is told as its concurrency, for one of it a pod: pods that are `taken`, starts that
    wait for one, and as many again as are to wait for the next.
    """
    return {
        each.name: min(each.most, taken.get(each.name, 0) + asked.get(each.name, 0) + each.waiting) for each in pools
    }


def _fits(pattern: str, tenant: str, model: str) -> bool:
    whose, _, which = pattern.partition("/")
    return whose in (WILDCARD, tenant) and which in (WILDCARD, model)
