"""How warm an idle model is kept: each level costs so much a second, and so much to wake from.

Ski rental with several slopes: after `t` idle seconds the level is the one that would have been cheapest had the pause
ended now, the lower envelope of `hold x t + wake`. Whatever the pauses are, that costs at most twice what somebody
would pay who knew their lengths (Irani, Shukla, Gupta: Online strategies for dynamic power management, 2003): what is
held costs just the envelope, and waking from the level that is reached costs no more than the envelope there. Amounts
are micro-units, times seconds. Pure but for the state of `IdleGaps`.
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
    """From the warmest to the coldest."""

    WARM = "warm"  # ready on its device slot
    ASLEEP = "asleep"  # weights in host memory, KV and device slot given back
    ASLEEP2 = "asleep2"  # the weights given back as well: nothing but the process
    ZERO = "zero"  # no process


@dataclass(frozen=True, slots=True)
class LevelPrice:
    """What a level costs: to be in for a second, and to leave when somebody asks."""

    level: Level
    hold: float
    wake: float


@dataclass(frozen=True, slots=True)
class LevelChange:
    """From so many idle seconds on, this level."""

    level: Level
    from_s: float


def plan_levels(level_prices: Sequence[LevelPrice]) -> tuple[LevelChange, ...]:
    """The lower envelope: levels in the order in which a pause passes them, the first from 0. Levels that are never
    cheapest are not in it.
    """
    at = min(level_prices, key=lambda rung: (rung.wake, rung.hold))
    level_changes = [LevelChange(at.level, 0.0)]
    while cheaper := [rung for rung in level_prices if rung.hold < at.hold]:
        then = min(cheaper, key=lambda rung: (_crossing_s(at, rung), rung.hold))
        level_changes.append(LevelChange(then.level, _crossing_s(at, then)))
        at = then
    return tuple(level_changes)


def level_after(level_changes: Sequence[LevelChange], idle_s: float) -> Level:
    """The level after so many idle seconds."""
    return next((step.level for step in reversed(level_changes) if idle_s >= step.from_s), level_changes[0].level)


def next_level_change(level_changes: Sequence[LevelChange], idle_s: float) -> LevelChange | None:
    """What follows the level of now; None where nothing does."""
    return next((step for step in level_changes if step.from_s > idle_s), None)


def pause_cost(level_prices: Iterable[LevelPrice], level_changes: Sequence[LevelChange], gap_s: float) -> float:
    """Of a pause of `gap_s` under the plan: all that was held, and the wake at its end."""
    of = {rung.level: rung for rung in level_prices}
    ends = [*(step.from_s for step in level_changes[1:]), float("inf")]
    held = sum(
        of[step.level].hold * (min(end, gap_s) - step.from_s)
        for step, end in zip(level_changes, ends, strict=True)
        if gap_s > step.from_s
    )
    return held + of[level_after(level_changes, gap_s)].wake


def optimal_pause_cost(level_prices: Iterable[LevelPrice], gap_s: float) -> float:
    """What somebody would pay who knew the pause's length: one level throughout, the cheapest."""
    return min(rung.hold * gap_s + rung.wake for rung in level_prices)


def _crossing_s(at: LevelPrice, then: LevelPrice) -> float:
    """When a level that holds cheaper has made up for its dearer wake."""
    return (then.wake - at.wake) / (at.hold - then.hold)


class IdleGaps(Generic[K]):
    """How long nobody asked, version by version: the last pauses of each, and how many there were by length."""

    def __init__(self) -> None:
        self._busy_s: OrderedDict[K, float] = OrderedDict()
        self._gaps: dict[K, deque[float]] = {}

    def __repr__(self) -> str:
        return f"<IdleGaps versions={len(self._busy_s)}>"

    def record_request(self, key: K, now: float) -> None:
        """Somebody asks, or is being served. A pause under two seconds is none."""
        before = self._busy_s.pop(key, None)
        self._busy_s[key] = now
        if before is not None and now - before >= MIN_IDLE_S:
            self._gaps.setdefault(key, deque(maxlen=MAX_GAPS)).append(now - before)
        while len(self._busy_s) > MAX_VERSIONS:
            gone, _ = self._busy_s.popitem(last=False)
            self._gaps.pop(gone, None)

    def idle_s(self, key: K, now: float) -> float | None:
        """Since when nobody asks; None where nobody ever did."""
        busy_s = self._busy_s.get(key)
        return None if busy_s is None else max(0.0, now - busy_s)

    def of(self, key: K) -> tuple[float, ...]:
        """The last pauses, the oldest first."""
        return tuple(self._gaps.get(key, ()))


def by_length(gaps: Iterable[float]) -> dict[int, int]:
    """How many pauses were at most 2, 4, 8, … seconds long, and longer than half of that."""
    found: dict[int, int] = {}
    for gap_s in gaps:
        bound = 2
        while bound < gap_s:
            bound *= 2
        found[bound] = found.get(bound, 0) + 1
    return dict(sorted(found.items()))
