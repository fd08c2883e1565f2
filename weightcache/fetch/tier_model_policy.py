"""How fast each tier below the host's brings bytes: learned from loads, as a fixed part and bytes per second. Pure.

A small load teaches what every load takes, a large one how fast bytes come. Where a load had several tiers, its time is
divided among them as it was expected to be. Until something was learned, a tier's figures are guesses.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

LARGE_BYTES: Final = 16 << 20
NEWEST_WEIGHT: Final = 0.3  # of the newest load
LEAST_SHARE: Final = 1e-3  # of a large load's time that its bytes took, whatever is said to be fixed
LEAST_BYTES_PER_S: Final = 1e3
MOST_BYTES_PER_S: Final = 1e12
LEAST_S: Final = 1e-6  # a load that a clock calls shorter took about that
Holds = Callable[[tuple[str, str]], bool]
ReloadS = Callable[[str, Iterable[tuple[str, int]]], float]


@dataclass(frozen=True, slots=True)
class Rate:
    """A tier's. `loads` is how many taught it, `large` ones its rate; of what nobody taught these are guesses."""

    bytes_per_s: float
    fixed_s: float
    loads: int = 0
    large: int = 0


UNKNOWN: Final[Mapping[str, Rate]] = {"nvme": Rate(1e9, 0.01), "peer": Rate(5e8, 0.02), "store": Rate(2e8, 0.03)}


class TierModel:
    """One per agent. Bytes of tiers that are not named here cost nothing: they are there already."""

    def __init__(self, guesses: Mapping[str, Rate] = UNKNOWN) -> None:
        self._rates = dict(guesses)

    def __repr__(self) -> str:
        return f"<Rates {self._rates}>"

    @property
    def by_tier(self) -> Mapping[str, Rate]:
        """As they are now."""
        return dict(self._rates)

    def load_time_s(self, bytes_by_tier: Mapping[str, int]) -> float:
        """How long a load of these would take."""
        return predict_load_s(self._rates, bytes_by_tier)

    def observe(self, bytes_by_tier: Mapping[str, int], seconds: float) -> None:
        """A load of these took so long."""
        moved = {tier: count for tier, count in bytes_by_tier.items() if count > 0 and tier in self._rates}
        if not moved or seconds <= 0:
            return
        seconds = max(seconds, LEAST_S)
        moving_s = sum(count / self._rates[tier].bytes_per_s for tier, count in moved.items())
        fixed_s = max(self._rates[tier].fixed_s for tier in moved)
        if sum(moved.values()) < LARGE_BYTES:
            for tier in moved:
                self._learn_fixed(tier, max(0.0, seconds - moving_s))
        else:
            stretch = max(seconds - fixed_s, LEAST_SHARE * seconds) / moving_s
            for tier in moved:
                self._learn_rate(tier, self._rates[tier].bytes_per_s / stretch)

    def _learn_fixed(self, tier: str, fixed_s: float) -> None:
        old = self._rates[tier]
        weight = NEWEST_WEIGHT if old.loads > old.large else 1.0
        mean_s = weight * fixed_s + (1.0 - weight) * old.fixed_s
        self._rates[tier] = replace(old, fixed_s=mean_s, loads=old.loads + 1)

    def _learn_rate(self, tier: str, bytes_per_s: float) -> None:
        old = self._rates[tier]
        weight = NEWEST_WEIGHT if old.large else 1.0
        # The mean is of seconds per byte: a mean of rates would forget the slow loads.
        mean = 1.0 / (weight / bytes_per_s + (1.0 - weight) / old.bytes_per_s)
        bounded = min(max(mean, LEAST_BYTES_PER_S), MOST_BYTES_PER_S)
        self._rates[tier] = replace(old, bytes_per_s=bounded, loads=old.loads + 1, large=old.large + 1)


def predict_load_s(rates: Mapping[str, Rate], bytes_by_tier: Mapping[str, int]) -> float:
    """Seconds for these bytes. Tiers share the readers, so their times add up; what is fixed is paid once."""
    moved = {tier: count for tier, count in bytes_by_tier.items() if count > 0 and tier in rates}
    if not moved:
        return 0.0
    return max(rates[tier].fixed_s for tier in moved) + sum(
        count / rates[tier].bytes_per_s for tier, count in moved.items()
    )


def slab_reload(rates: TierModel, holds: Holds) -> ReloadS:
    """Seconds for a tenant's (digest, length) to come back to memory; `holds` says what is on the disk."""

    def seconds(tenant: str, chunks: Iterable[tuple[str, int]]) -> float:
        by_tier: Counter[str] = Counter()
        for digest, length in chunks:
            by_tier["nvme" if holds((tenant, digest)) else "store"] += length
        return rates.load_time_s(by_tier)

    return seconds


def file_reload(rates: TierModel) -> Callable[[int], float]:
    """Seconds for so many bytes to come back to the disk."""
    return lambda length: rates.load_time_s({"store": length})
