"""Decide how warm an idle model stays. Each level has a price per second and a price to wake from it.

This is the ski-rental problem with several slopes. After `t` idle seconds, the level is the one that would be cheapest
if the pause ended now: the lower envelope of the lines `hold x t + wake`. That costs at most twice the optimum for
known pauses (Irani, Shukla, Gupta: Online strategies for dynamic power management, 2003): the holding cost follows the
envelope, and waking costs no more than the envelope there. Prices are micro-units, per second or per wake. Pure but for
the state of `IdleGaps`.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from controlplane.scaling.policy.reclaim import MIN_IDLE_S

K = TypeVar("K", bound=Hashable)

MAX_GAPS: Final = 256  # per version
MAX_VERSIONS: Final = 4096


class Level(StrEnum):
    """How warm an idle replica is, from the warmest to the coldest."""

    WARM = "warm"  # ready on its device slot
    ASLEEP = "asleep"  # keeps weights in host memory; has no KV cache and no device slot
    DEEP_SLEEP = "asleep2"  # has no weights either: only the process is left
    ZERO = "zero"  # no process


@dataclass(frozen=True, slots=True)
class LevelPrice:
    """The price of a level: `hold` per second, and `wake` for leaving it when a request comes."""

    level: Level
    hold: float
    wake: float


@dataclass(frozen=True, slots=True)
class LevelChange:
    """The level that begins after `from_s` idle seconds."""

    level: Level
    from_s: float


def plan_levels(level_prices: Sequence[LevelPrice]) -> tuple[LevelChange, ...]:
    """Return the lower envelope: the levels in the order in which a pause passes them, the first from 0 seconds. A
    level that is never the cheapest is left out.
    """
    current = min(level_prices, key=lambda price: (price.wake, price.hold))
    level_changes = [LevelChange(current.level, 0.0)]
    while cheaper := [price for price in level_prices if price.hold < current.hold]:
        colder = min(cheaper, key=lambda price: (_crossing_s(current, price), price.hold))
        level_changes.append(LevelChange(colder.level, _crossing_s(current, colder)))
        current = colder
    return tuple(level_changes)


def level_after(level_changes: Sequence[LevelChange], idle_s: float) -> Level:
    """Return the level after `idle_s` idle seconds."""
    return next((step.level for step in reversed(level_changes) if idle_s >= step.from_s), level_changes[0].level)


def next_level_change(level_changes: Sequence[LevelChange], idle_s: float) -> LevelChange | None:
    """Return the change that comes after `idle_s` idle seconds; None after the last one."""
    return next((step for step in level_changes if step.from_s > idle_s), None)


def pause_cost(level_prices: Iterable[LevelPrice], level_changes: Sequence[LevelChange], gap_s: float) -> float:
    """Return the cost of a pause of `gap_s` seconds under the plan: all holding, and the wake at its end."""
    price_by_level = {price.level: price for price in level_prices}
    ends = [*(step.from_s for step in level_changes[1:]), float("inf")]
    held = sum(
        price_by_level[step.level].hold * (min(end, gap_s) - step.from_s)
        for step, end in zip(level_changes, ends, strict=True)
        if gap_s > step.from_s
    )
    return held + price_by_level[level_after(level_changes, gap_s)].wake


def optimal_pause_cost(level_prices: Iterable[LevelPrice], gap_s: float) -> float:
    """Return the least possible cost of a pause whose length is known: the cheapest level throughout."""
    return min(price.hold * gap_s + price.wake for price in level_prices)


def _crossing_s(current: LevelPrice, colder: LevelPrice) -> float:
    """Return the idle seconds after which the cheaper holding of `colder` has paid for its more expensive wake."""
    return (colder.wake - current.wake) / (current.hold - colder.hold)


class IdleGaps(Generic[K]):
    """The last pauses between requests of each version. Bounded: forgets the version that was busy longest ago."""

    def __init__(self) -> None:
        self._busy_s: OrderedDict[K, float] = OrderedDict()
        self._gaps: dict[K, deque[float]] = {}

    def __repr__(self) -> str:
        return f"<IdleGaps versions={len(self._busy_s)}>"

    def record_request(self, key: K, now: float) -> None:
        """Record that the version is requested or serves. A pause shorter than MIN_IDLE_S does not count."""
        before = self._busy_s.pop(key, None)
        self._busy_s[key] = now
        if before is not None and now - before >= MIN_IDLE_S:
            self._gaps.setdefault(key, deque(maxlen=MAX_GAPS)).append(now - before)
        while len(self._busy_s) > MAX_VERSIONS:
            gone, _ = self._busy_s.popitem(last=False)
            self._gaps.pop(gone, None)

    def idle_s(self, key: K, now: float) -> float | None:
        """Return the seconds since the version was last busy; None if it never was."""
        busy_s = self._busy_s.get(key)
        return None if busy_s is None else max(0.0, now - busy_s)

    def gaps_of(self, key: K) -> tuple[float, ...]:
        """Return the version's last pauses in seconds, the oldest first."""
        return tuple(self._gaps.get(key, ()))


def gap_histogram(gaps: Iterable[float]) -> dict[int, int]:
    """Return a histogram of pauses by upper bound in seconds: 2, 4, 8, …"""
    found: dict[int, int] = {}
    for gap_s in gaps:
        bound = 2
        while bound < gap_s:
            bound *= 2
        found[bound] = found.get(bound, 0) + 1
    return dict(sorted(found.items()))
