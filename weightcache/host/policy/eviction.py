"""Choose what to evict: the least valuable candidates, never any in use. Pure; callers have budgets, clocks,
measurements.

    value = seconds to reload x recency / size

Recency is 1 at the last use and halves with every half-life since. The size is in the unit of the budget. Candidates
are compared by the logarithm of the value, log2(seconds / size) + (used_at - now) / half_life. `now` is the same in
all, so it drops out: the order does not change as time passes, and nothing underflows after a long idle time. Of equal
candidates the least recently used goes. If all have the same cost per size, this is LRU.

Each tenant has a quota of a tier. While there is room, its versions together may exceed it (the host tier refuses one
version that exceeds it alone). Under pressure, tenants over their quota lose their surplus first. A tenant that would
exceed its quota takes nothing from tenants within theirs.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

KeyT = TypeVar("KeyT")

_LEAST_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate(Generic[KeyT]):
    """Something evictable: its size in the budget's unit, the time of its last use, and the seconds to reload it."""

    key: KeyT
    size: int
    used_at: float
    reload_s: float = 1.0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class TenantShares:
    """The holdings of each tenant, including the pending request of `requesting_tenant`, and the quota per tenant."""

    held: Mapping[str, int]
    quota: int
    requesting_tenant: str


def rank(candidate: Candidate[KeyT], half_life_s: float) -> tuple[float, float]:
    """Return a sort key that orders candidates like their values, lowest first."""
    per_unit = max(candidate.reload_s, _LEAST_S) / max(candidate.size, 1)
    return math.log2(per_unit) + candidate.used_at / half_life_s, candidate.used_at


def choose_victims(
    candidates: Iterable[Candidate[KeyT]], needed: int, half_life_s: float, shares: TenantShares | None = None
) -> tuple[KeyT, ...] | None:
    """Return the least valuable candidates that together free `needed`; None if they can't free as much."""
    if needed <= 0:
        return ()  # the common case, once per admission: skip the sort
    ranked = sorted(candidates, key=lambda each: rank(each, half_life_s))
    if shares is not None:
        ranked = _order_by_quota(ranked, shares)
    chosen: list[KeyT] = []
    freed = 0
    for candidate in ranked:
        if freed >= needed:
            break
        chosen.append(candidate.key)
        freed += candidate.size
    return tuple(chosen) if freed >= needed else None


def _order_by_quota(ranked: Iterable[Candidate[KeyT]], shares: TenantShares) -> list[Candidate[KeyT]]:
    """Return the surplus of tenants over their quotas, then the rest. The rest has other tenants' candidates only if
    `requesting_tenant` stays within its quota.
    """
    held = dict(shares.held)
    surplus: list[Candidate[KeyT]] = []
    rest: list[Candidate[KeyT]] = []
    for candidate in ranked:
        if held.get(candidate.tenant, 0) > shares.quota:
            held[candidate.tenant] -= candidate.size
            surplus.append(candidate)
        else:
            rest.append(candidate)
    if held.get(shares.requesting_tenant, 0) > shares.quota:
        rest = [candidate for candidate in rest if candidate.tenant == shares.requesting_tenant]
    return surplus + rest
