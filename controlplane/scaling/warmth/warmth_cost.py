"""Compute what each level of warmth costs a version, from the price book, the price of memory, and past restores."""

from dataclasses import dataclass
from typing import Final

from controlplane.clock import Clock
from controlplane.ledger.policy.rating import ANY_CLASS, PriceBook
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.policy.breakeven import Level, LevelChange, LevelPrice, plan_levels
from controlplane.scaling.policy.eta import RestoreHistory, RestoreTime

GIB: Final = 1 << 30
PROCESS_BYTES: Final = 64 << 20  # own memory of a replica without weights and KV cache: not shared with the zygote


@dataclass(frozen=True, slots=True)
class WarmthPrices:
    """A version's prices in micro-units per second, its bytes by level, and its measured restore times."""

    idle: float  # of the device while the replica is idle
    restore: float  # of the device while it restores
    memory: float  # of one GiB of host memory
    wait: float  # of a waiting caller
    warm_bytes: int
    asleep_bytes: int
    asleep2_bytes: int
    start: RestoreTime
    wake: RestoreTime
    refill: RestoreTime  # from sleep without weights

    @property
    def level_prices(self) -> tuple[LevelPrice, ...]:
        """Return the prices of all levels, from the warmest to the coldest."""
        per_s = self.wait + self.restore
        return (
            LevelPrice(Level.WARM, self.idle + self.memory * self.warm_bytes / GIB, 0.0),
            LevelPrice(Level.ASLEEP, self.memory * self.asleep_bytes / GIB, self.wake.seconds * per_s),
            LevelPrice(Level.DEEP_SLEEP, self.memory * self.asleep2_bytes / GIB, self.refill.seconds * per_s),
            LevelPrice(Level.ZERO, 0.0, self.start.seconds * per_s),
        )


class WarmthCost:
    """Computes costs from the price book and the restore history. Has no state of its own."""

    def __init__(
        self, book: PriceBook, history: RestoreHistory[VersionKey], clock: Clock, *, kv_bytes: int, memory_price: float
    ) -> None:
        self._book = book
        self._history = history
        self._clock = clock
        self._kv_bytes = kv_bytes
        self._memory_price = memory_price

    def __repr__(self) -> str:
        return f"<WarmthCost {self._book.currency} memory={self._memory_price:g}>"

    @property
    def currency(self) -> str:
        """Return the currency. All amounts are millionths of it."""
        return self._book.currency

    def find_prices(self, model: Model, version: Version, device_class: str = ANY_CLASS) -> WarmthPrices:
        """Return the version's prices at this moment."""
        device = self._book.prices_at(self._clock.wall_s() * 1_000_000).device_prices(device_class)
        total = version.registration.total_bytes
        return WarmthPrices(
            idle=device.idle,
            restore=device.restore,
            memory=self._memory_price,
            wait=model.scale.wait_price,
            warm_bytes=total + self._kv_bytes + PROCESS_BYTES,
            asleep_bytes=total + PROCESS_BYTES,
            asleep2_bytes=PROCESS_BYTES,
            start=self._history.start_time(version.key, total),
            wake=self._history.wake_time(version.key, total),
            refill=self._history.refill_time(version.key, total),
        )

    def fetch_times(self, key: VersionKey) -> dict[str, RestoreTime]:
        """Return how long the version's own leases took, by the slowest tier that bytes came from."""
        return self._history.fetch_times(key)

    def level_changes(self, model: Model, version: Version) -> tuple[LevelChange, ...]:
        """Return when the version's last replica changes its level."""
        return plan_levels(self.find_prices(model, version).level_prices)
