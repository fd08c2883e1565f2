"""Predict how long a tier takes to load bytes: a fixed part plus bytes per second, learned from loads. Pure.

Small loads teach the fixed part, large ones the rate. If a large load read from several tiers, its time is divided
among them in proportion to the predictions. A small load teaches each of its tiers the same fixed part. Until a tier
has loads, its figures are guesses.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from weightcache.host.policy.host_index import ReloadEstimator

LARGE_BYTES: Final = 16 << 20
NEWEST_WEIGHT: Final = 0.3  # weight of the newest load
LEAST_SHARE: Final = 1e-3  # lowest share of a large load's time that counts for its bytes, whatever the fixed part
LEAST_BYTES_PER_S: Final = 1e3
MOST_BYTES_PER_S: Final = 1e12
LEAST_S: Final = 1e-6  # shortest duration of a load; a clock may report less
IsOnDisk = Callable[[tuple[str, str]], bool]


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Speed of a tier. `loads` counts observed loads, `large` the large ones, which teach the rate."""

    bytes_per_s: float
    fixed_s: float
    loads: int = 0
    large: int = 0


INITIAL_SPEEDS: Final = {"nvme": TierSpeed(1e9, 0.01), "peer": TierSpeed(5e8, 0.02), "store": TierSpeed(2e8, 0.03)}


class TierModel:
    """The model of one agent. Bytes in tiers without a rate cost nothing: they are in memory already."""

    def __init__(self, initial_speeds: Mapping[str, TierSpeed] = INITIAL_SPEEDS) -> None:
        self._speeds = dict(initial_speeds)

    @property
    def by_tier(self) -> Mapping[str, TierSpeed]:
        """Return the current speeds."""
        return dict(self._speeds)

    def load_time_s(self, bytes_by_tier: Mapping[str, int]) -> float:
        """Return the predicted duration of a load with these bytes."""
        return predict_load_s(self._speeds, bytes_by_tier)

    def observe(self, bytes_by_tier: Mapping[str, int], seconds: float) -> None:
        """Learn from a load of these bytes that took `seconds`."""
        bytes_moved = {tier: count for tier, count in bytes_by_tier.items() if count > 0 and tier in self._speeds}
        if not bytes_moved or seconds <= 0:
            return
        seconds = max(seconds, LEAST_S)
        moving_s = sum(count / self._speeds[tier].bytes_per_s for tier, count in bytes_moved.items())
        fixed_s = max(self._speeds[tier].fixed_s for tier in bytes_moved)
        if sum(bytes_moved.values()) < LARGE_BYTES:
            for tier in bytes_moved:
                self._learn_fixed(tier, max(0.0, seconds - moving_s))
        else:
            slowdown = max(seconds - fixed_s, LEAST_SHARE * seconds) / moving_s
            for tier in bytes_moved:
                self._learn_rate(tier, self._speeds[tier].bytes_per_s / slowdown)

    def _learn_fixed(self, tier: str, fixed_s: float) -> None:
        old = self._speeds[tier]
        weight = NEWEST_WEIGHT if old.loads > old.large else 1.0
        mean_s = weight * fixed_s + (1.0 - weight) * old.fixed_s
        self._speeds[tier] = replace(old, fixed_s=mean_s, loads=old.loads + 1)

    def _learn_rate(self, tier: str, bytes_per_s: float) -> None:
        old = self._speeds[tier]
        weight = NEWEST_WEIGHT if old.large else 1.0
        # Average seconds per byte: an average of rates would underweight slow loads.
        mean = 1.0 / (weight / bytes_per_s + (1.0 - weight) / old.bytes_per_s)
        bounded = min(max(mean, LEAST_BYTES_PER_S), MOST_BYTES_PER_S)
        self._speeds[tier] = replace(old, bytes_per_s=bounded, loads=old.loads + 1, large=old.large + 1)


def predict_load_s(speeds: Mapping[str, TierSpeed], bytes_by_tier: Mapping[str, int]) -> float:
    """Return the predicted seconds for these bytes. Tiers share readers, so times add up; one fixed part is paid."""
    bytes_moved = {tier: count for tier, count in bytes_by_tier.items() if count > 0 and tier in speeds}
    if not bytes_moved:
        return 0.0
    return max(speeds[tier].fixed_s for tier in bytes_moved) + sum(
        count / speeds[tier].bytes_per_s for tier, count in bytes_moved.items()
    )


def slab_reload_estimator(tier_model: TierModel, is_on_disk: IsOnDisk) -> ReloadEstimator:
    """Return a function that predicts the seconds to reload a tenant's (digest, length) to memory. `is_on_disk` tells
    which chunks are on the disk.
    """

    def seconds(tenant: str, chunks: Iterable[tuple[str, int]]) -> float:
        by_tier: Counter[str] = Counter()
        for digest, length in chunks:
            by_tier["nvme" if is_on_disk((tenant, digest)) else "store"] += length
        return tier_model.load_time_s(by_tier)

    return seconds


def file_reload_estimator(tier_model: TierModel) -> Callable[[int], float]:
    """Return a function that predicts the seconds to reload a number of bytes to the disk."""
    return lambda length: tier_model.load_time_s({"store": length})
