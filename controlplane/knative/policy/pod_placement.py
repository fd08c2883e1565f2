"""Decide which versions may run on pooled pods, and on which free pod. Pure.

A pod holds one version, so packing means choosing the smallest pod with enough room. Large pods are kept for versions
that fit nowhere else.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

WILDCARD: Final = "*"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Pods of one kind: room for a version's weights, how many wait at least, and how many exist at most."""

    name: str
    weight_bytes: int
    min_waiting: int
    maximum: int


@dataclass(frozen=True, slots=True)
class FreePod:
    """A pod that waits for a version since `since_us`."""

    pod: str
    weight_bytes: int
    since_us: int


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """The models whose versions share pods. `models` are TENANT/MODEL, where each part is a name or *. Tenants in
    `excluded_tenants` have pods of their own only.
    """

    models: tuple[str, ...] = ()
    excluded_tenants: frozenset[str] = frozenset()

    def is_pooled(self, tenant: str, model: str) -> bool:
        """Return whether versions of the model share pods."""
        if tenant in self.excluded_tenants:
            return False
        return any(_fits(pattern, tenant, model) for pattern in self.models)


def pool_for(weight_bytes: int, pools: Iterable[PoolSpec]) -> PoolSpec | None:
    """Return the pool whose pods have the least room that is enough; None if no pool has enough."""
    found = (each for each in pools if each.weight_bytes >= weight_bytes)
    return min(found, key=lambda each: (each.weight_bytes, each.name), default=None)


def choose_pod(weight_bytes: int, waiting: Iterable[FreePod]) -> FreePod | None:
    """Return the smallest pod that fits, of equals the one that has waited longest; None if none fits."""
    found = (each for each in waiting if each.weight_bytes >= weight_bytes)
    return min(found, key=lambda each: (each.weight_bytes, each.since_us, each.pod), default=None)


def pool_concurrency(
    pools: Collection[PoolSpec], taken: Mapping[str, int], waiting_starts: Mapping[str, int]
) -> dict[str, int]:
    """Return by pool the concurrency to report to its autoscaler, which makes one pod for each: pods that are `taken`,
    starts that wait for a pod, and pods that should wait.
    """
    return {
        each.name: min(each.maximum, taken.get(each.name, 0) + waiting_starts.get(each.name, 0) + each.min_waiting)
        for each in pools
    }


def _fits(pattern: str, tenant: str, model: str) -> bool:
    tenant_pattern, _, model_pattern = pattern.partition("/")
    return tenant_pattern in (WILDCARD, tenant) and model_pattern in (WILDCARD, model)
