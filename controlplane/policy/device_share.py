"""Decide how many device slots a tenant's minimums may keep while other tenants wait for a slot. Pure.

A minimum keeps a slot whether or not anybody calls, so a tenant could take every slot of the machine with one setting.
While others wait, minimums of a tenant therefore keep at most the tenant's share: slots in proportion to its weight
among the tenants that hold a slot or wait for one, rounded down. For example: 8 slots, weights 1 and 3: 2 and 6 slots.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def share(slots: int, weights: Mapping[str, int], tenant: str) -> int:
    """Return the tenant's slots. `weights` are those of all tenants that compete, this one among them."""
    return slots * weights[tenant] // sum(weights.values())


def bounded(slots: int, minimums: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Return what each of a tenant's minimums still keeps where all together keep `slots`: the first ones first."""
    kept = {}
    for key, least in minimums:
        kept[key] = min(least, slots)
        slots -= kept[key]
    return kept
