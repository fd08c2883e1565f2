"""How warm an idle model is kept: each level costs so much a second, and so much to wake from.

Ski rental with several slopes: after `t` idle seconds the level is the one that would have been cheapest had the pause
ended now, the lower envelope of `hold x t + wake`. Whatever the pauses are, that costs at most twice what somebody
would pay who knew their lengths (Irani, Shukla, Gupta: Online strategies for dynamic power management, 2003): what is
held costs just the envelope, and waking from the level that is reached costs no more than the envelope there. Amounts
are micro-units, times seconds. Pure but for the state of `Gaps`.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from controlplane.policy.reclaim import MIN_IDLE_S

K = TypeVar("K", bound=Hashable)

KEPT_GAPS: Final = 256  # per version
MAX_VERSIONS: Final = 4096


class Level(StrEnum):
    """From the warmest to the coldest."""

    WARM = "warm"  # ready on its device slot
    ASLEEP = "asleep"  # weights in host memory, KV and device slot given back
    ASLEEP2 = "asleep2"  # the weights given back as well: nothing but the process
    ZERO = "zero"  # no process


@dataclass(frozen=True, slots=True)
class Rung:
    """What a level costs: to be in for a second, and to leave when somebody asks."""

    level: Level
    hold: float
    wake: float


@dataclass(frozen=True, slots=True)
class Step:
    """From so many idle seconds on, this level."""

    level: Level
    from_s: float


def plan(rungs: Sequence[Rung]) -> tuple[Step, ...]:
    """The lower envelope: levels in the order in which a pause passes them, the first from 0. Levels that are never
    cheapest are not in it.
    """
    at = min(rungs, key=lambda rung: (rung.wake, rung.hold))
    steps = [Step(at.level, 0.0)]
    while cheaper := [rung for rung in rungs if rung.hold < at.hold]:
        then = min(cheaper, key=lambda rung: (_crossing_s(at, rung), rung.hold))
        steps.append(Step(then.level, _crossing_s(at, then)))
        at = then
    return tuple(steps)


def level_at(steps: Sequence[Step], idle_s: float) -> Level:
    """The level after so many idle seconds."""
    return next((step.level for step in reversed(steps) if idle_s >= step.from_s), steps[0].level)


def next_step(steps: Sequence[Step], idle_s: float) -> Step | None:
    """What follows the level of now; None where nothing does."""
    return next((step for step in steps if step.from_s > idle_s), None)


def cost(rungs: Iterable[Rung], steps: Sequence[Step], gap_s: float) -> float:
    """Of a pause of `gap_s` under the plan: all that was held, and the wake at its end."""
    of = {rung.level: rung for rung in rungs}
    ends = [*(step.from_s for step in steps[1:]), float("inf")]
    held = sum(
        of[step.level].hold * (min(end, gap_s) - step.from_s)
        for step, end in zip(steps, ends, strict=True)
        if gap_s > step.from_s
    )
    return held + of[level_at(steps, gap_s)].wake


def best(rungs: Iterable[Rung], gap_s: float) -> float:
    """What somebody would pay who knew the pause's length: one level throughout, the cheapest."""
    return min(rung.hold * gap_s + rung.wake for rung in rungs)


def _crossing_s(at: Rung, then: Rung) -> float:
    """When a level that holds cheaper has made up for its dearer wake."""
    return (then.wake - at.wake) / (at.hold - then.hold)


class Gaps(Generic[K]):
    """How long nobody asked, version by version: the last pauses of each, and how many there were by length."""

    def __init__(self) -> None:
        self._busy_s: OrderedDict[K, float] = OrderedDict()
        self._gaps: dict[K, deque[float]] = {}

    def __repr__(self) -> str:
        return f"<Gaps versions={len(self._busy_s)}>"

    def busy(self, key: K, now: float) -> None:
        """Somebody asks, or is being served. A pause under two seconds is none."""
        before = self._busy_s.pop(key, None)
        self._busy_s[key] = now
        if before is not None and now - before >= MIN_IDLE_S:
            self._gaps.setdefault(key, deque(maxlen=KEPT_GAPS)).append(now - before)
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
