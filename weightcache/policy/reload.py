"""What it costs to have bytes again: seconds, by the tier that they would come from, at learned rates. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable

from weightcache.policy.rates import Rates

Holds = Callable[[tuple[str, str]], bool]
ReloadS = Callable[[str, Iterable[tuple[str, int]]], float]


def slab_reload(rates: Rates, holds: Holds) -> ReloadS:
    """Seconds for a tenant's (digest, length) to come back to memory; `holds` says what is on the disk."""

    def seconds(tenant: str, chunks: Iterable[tuple[str, int]]) -> float:
        by_tier: Counter[str] = Counter()
        for digest, length in chunks:
            by_tier["nvme" if holds((tenant, digest)) else "store"] += length
        return rates.time_s(by_tier)

    return seconds


def file_reload(rates: Rates) -> Callable[[int], float]:
    """Seconds for so many bytes to come back to the disk."""
    return lambda length: rates.time_s({"store": length})
