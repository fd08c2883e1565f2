"""Divide a fixed number of device slots: among tenants by their minimums, and on a cluster among versions. Pure.

A minimum keeps a slot even without requests, so one tenant could take every slot of the machine with one setting.
Therefore, while other tenants wait, a tenant's minimums keep at most its share. The share is in proportion to its
weight among the tenants that hold a slot or wait for one, rounded down. Example: with 8 slots and weights 1 and 3,
shares are 2 and 6.

Knative bounds each version separately (`max-scale`), and no version can be bounded to zero replicas, because Knative
reads 0 as "no bound". So versions get their parts in turn: as much as each may have, or what is left, and at least 1. A
later version never changes the parts of earlier ones: a new bound makes a new revision, and Knative starts a pod of it.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


def tenant_share(slots: int, weights: Mapping[str, int], tenant: str) -> int:
    """Return the tenant's share of `slots`. `weights` are those of all competing tenants, including this one."""
    return slots * weights[tenant] // sum(weights.values())


def cap_minimums(slots: int, minimums: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Return a tenant's minimums, cut so that they add up to `slots` at most. Earlier ones are served first."""
    kept = {}
    for key, minimum in minimums:
        kept[key] = min(minimum, slots)
        slots -= kept[key]
    return kept


@dataclass(frozen=True, slots=True)
class DeviceClaim(Generic[K]):
    """A version's claim: its minimum and maximum of replicas. A version that is leaving gets what is left,
    and takes nothing away from later ones.
    """

    key: K
    minimum: int
    maximum: int
    is_leaving: bool = False


def divide_devices(devices: int, claims: Iterable[DeviceClaim[K]]) -> dict[K, int]:
    """Return how many replicas each version may have. The first claim is served first.

    A part is at most `maximum`, but at least `minimum` and 1. Without versions that are leaving, the parts add up to
    `devices` at most. They exceed it only by the `minimum` (or 1) of versions that found fewer left.
    """
    left, parts = max(0, devices), {}
    for claim in claims:
        part = parts[claim.key] = max(1, claim.minimum, min(claim.maximum, left))
        if not claim.is_leaving:
            left = max(0, left - part)
    return parts
