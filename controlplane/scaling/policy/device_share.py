"""Divide a fixed number of device slots among tenants whose minimums keep slots while others wait, and, on a cluster,
among versions. Pure.

A minimum keeps a slot whether or not anybody calls, so a tenant could take every slot of the machine with one setting.
So while others wait, a tenant's minimums keep at most its share: slots in proportion to its weight among the tenants
that hold a slot or wait for one, rounded down. Example: with 8 slots and weights 1 and 3, shares are 2 and 6.

Knative bounds each version by itself (`max-scale`), and none can be bounded to nothing (0 is no bound to it). So
versions are given their parts in turn, each as much as it may have or as is left, and one at the least. A later version
never changes what those before it have: another bound is another revision, of which Knative starts a pod.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


def tenant_share(slots: int, weights: Mapping[str, int], tenant: str) -> int:
    """Return the tenant's share of `slots`. `weights` are of all competing tenants, this one included."""
    return slots * weights[tenant] // sum(weights.values())


def cap_minimums(slots: int, minimums: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Return a tenant's minimums cut to `slots` in all. Earlier ones are served first."""
    kept = {}
    for key, least in minimums:
        kept[key] = min(least, slots)
        slots -= kept[key]
    return kept


@dataclass(frozen=True, slots=True)
class DeviceClaim(Generic[K]):
    """A version's: replicas that it always has, and at most. One that is leaving is given what is left, and holds
    nothing of it.
    """

    key: K
    least: int
    maximum: int
    is_leaving: bool = False


def divide_devices(devices: int, claims: Iterable[DeviceClaim[K]]) -> dict[K, int]:
    """Replicas of each at most, the first claim first: never over its `maximum`, never under its `least` nor under 1.

    All but those that are leaving come to `devices`, and to more by no more than the `least` (or 1) of each that found
    fewer left.
    """
    left, parts = max(0, devices), {}
    for claim in claims:
        part = parts[claim.key] = max(1, claim.least, min(claim.maximum, left))
        if not claim.is_leaving:
            left = max(0, left - part)
    return parts
