"""Whom to evict: what is worth least, never what is in use. Pure; budgets, clocks and measurements are the callers'.

    value = seconds to bring it back x recency / size

Recency is 1 at the last use and halves with every half-life since. The size is in the unit of the budget. Values are
compared by their logarithms, log2(seconds / size) + (used_at - now) / half_life: `now` is the same in all of them, so
it drops out, the order does not change as time passes, and nothing underflows however long a thing was idle. Of equals
the least recently used goes. Where all cost the same for their size that is LRU.

Tenants have quotas of a tier. While there is room nobody asks for them; where something has to go, it is first that of
tenants who have more than theirs, and who would have more takes nothing from those who have not.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

_LEAST_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Key]):
    """Something that could go: its size in the budget's unit, when it was last used, what it costs to have it again."""

    key: Key
    size: int
    used_at: float
    reload_s: float = 1.0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class TenantShares:
    """What tenants have, with what `requesting_tenant` is about to get, and what each may have where others
    want it, too.
    """

    held: Mapping[str, int]
    quota: int
    requesting_tenant: str


def rank(candidate: Candidate[Key], half_life_s: float) -> tuple[float, float]:
    """Orders candidates as their values do, the least first."""
    per_unit = max(candidate.reload_s, _LEAST_S) / max(candidate.size, 1)
    return math.log2(per_unit) + candidate.used_at / half_life_s, candidate.used_at


def choose_victims(
    candidates: Iterable[Candidate[Key]], need: int, half_life_s: float, shares: TenantShares | None = None
) -> tuple[Key, ...] | None:
    """The candidates of the least value whose sizes add up to `need`, and none too many; None where they can't."""
    if need <= 0:
        return ()  # without looking at them all: this is the common case, once per admission
    ranked = sorted(candidates, key=lambda each: rank(each, half_life_s))
    if shares is not None:
        ranked = _order_by_quota(ranked, shares)
    chosen: list[Key] = []
    freed = 0
    for candidate in ranked:
        if freed >= need:
            break
        chosen.append(candidate.key)
        freed += candidate.size
    return tuple(chosen) if freed >= need else None


def _order_by_quota(ranked: Iterable[Candidate[Key]], shares: TenantShares) -> list[Candidate[Key]]:
    """What tenants have beyond their quotas first; then the rest, of others only where `requesting_tenant`
    stays within its.
    """
    held = dict(shares.held)
    surplus: list[Candidate[Key]] = []
    within: list[Candidate[Key]] = []
    for candidate in ranked:
        if held.get(candidate.tenant, 0) > shares.quota:
            held[candidate.tenant] -= candidate.size
            surplus.append(candidate)
        else:
            within.append(candidate)
    if held.get(shares.requesting_tenant, 0) > shares.quota:
        within = [candidate for candidate in within if candidate.tenant == shares.requesting_tenant]
    return surplus + within
