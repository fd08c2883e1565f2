"""Decide how many device slots a tenant's minimums may keep while other tenants wait for a slot. Pure.

A minimum keeps a slot whether or not anybody calls, so a tenant could take every slot of the machine with one setting.
So while others wait, a tenant's minimums keep at most its share: slots in proportion to its weight among the tenants
that hold a slot or wait for one, rounded down. Example: with 8 slots and weights 1 and 3, shares are 2 and 6.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def share(slots: int, weights: Mapping[str, int], tenant: str) -> int:
    """Return the tenant's share of `slots`. `weights` are of all competing tenants, this one included."""
    return slots * weights[tenant] // sum(weights.values())


def bounded(slots: int, minimums: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Return a tenant's minimums cut to `slots` in all. Earlier ones are served first."""
    kept = {}
    for key, least in minimums:
        kept[key] = min(least, slots)
        slots -= kept[key]
    return kept
