"""Which version answers beside one that was only just named, while that starts: the one that answered before. Pure.

A version that is named has no replica yet, then one, and as many as are asked for only a while later. Until then what
it can't take goes to the one before it, as far as that is awake: nobody waits for a start because of a deploy.
"""

from collections.abc import Collection, Mapping
from math import inf


def young(named: Collection[str], ready_since_s: Mapping[str, float], now_s: float, overlap_s: float) -> list[str]:
    """Versions that are named and were not ready `overlap_s` ago. `ready_since_s` has those that have been once."""
    return [version for version in sorted(named) if now_s - ready_since_s.get(version, inf) < overlap_s]


def meanwhile(
    named: Collection[str], ready_since_s: Mapping[str, float], now_s: float, overlap_s: float
) -> dict[str, str]:
    """Of each young one the version that was ready before it, if there is any: one that is named, too, or else the
    latest.
    """
    found: dict[str, str] = {}
    for version in young(named, ready_since_s, now_s, overlap_s):
        since_s = ready_since_s.get(version, inf)
        before = [(other in named, at_s, other) for other, at_s in ready_since_s.items() if at_s < since_s]
        if before:
            found[version] = max(before)[2]
    return found
