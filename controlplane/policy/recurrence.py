"""When a version that nobody uses will be asked for again, by how long its pauses were. Pure; times are seconds.

From the head of the pauses' distribution on it should be warm, until its tail (Shahrad et al.: Serverless in the Wild,
ATC 2020). Theirs is the distribution of all pauses; here it is of those that were longer than this one is already, and
of these the shortest that are alike: so a model that is asked for every few minutes by day, and then not before the
next morning, is expected after a few minutes, and once that has passed, in the morning. Pauses that have no such
cluster, as those of calls that come independently of one another, foretell nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Final

from controlplane.policy.breakeven import LEAST_GAP_S

HEAD: Final = 0.05
TAIL: Final = 0.99
MARGIN: Final = 0.1  # of both, outwards
SPREAD: Final = 1.5  # pauses are alike up to so many times the shortest
LEAST_ALIKE: Final = 3
LEAST_SHARE: Final = 0.5  # of those that are left must be alike
DOUBT: Final = 0.5  # what is expected for certain is worth that much of what was just used
LEAST_LEAD_S: Final = 2.0
BURST_S: Final = 60.0


class Why(StrEnum):
    """Why nothing is expected."""

    FEW = "few"  # pauses of that length
    SCATTERED = "scattered"  # they are not alike


@dataclass(frozen=True, slots=True)
class Expected:
    """A call, so long after the last one. `alike` of `of` pauses say so."""

    opens_s: float
    closes_s: float
    alike: int
    of: int

    def is_due(self, idle_s: float, lead_s: float) -> bool:
        """Whether what takes `lead_s` should begin now, or have begun."""
        return self.opens_s - lead_s <= idle_s < self.closes_s


@dataclass(frozen=True, slots=True)
class Unexpected:
    """Nothing is; it may be worth another look once the pause is longer than `look_again_s`."""

    why: Why
    look_again_s: float | None = None


def expect(pauses: Sequence[float], longer_than_s: float) -> Expected | Unexpected:
    """The next call of a version whose pause is, or will be, longer than that."""
    later = sorted(pause for pause in pauses if pause > longer_than_s)
    if len(later) < LEAST_ALIKE:
        return Unexpected(Why.FEW)
    head = later[int(HEAD * len(later))]
    alike = [pause for pause in later if pause <= head * SPREAD]
    if len(alike) < LEAST_ALIKE or len(alike) < LEAST_SHARE * len(later):
        return Unexpected(Why.SCATTERED, alike[-1])
    tail = alike[ceil(TAIL * len(alike)) - 1]
    return Expected(head * (1 - MARGIN), tail * (1 + MARGIN), len(alike), len(later))


def lead_s(restore_s: float) -> float:
    """How long before it is expected a version should be asked for, whose restores took that long."""
    return max(LEAST_LEAD_S, 2 * restore_s)


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of expectations: the call came after the version was brought, too early for that, or not in time."""

    came: int = 0
    early: int = 0
    missed: int = 0


def worth(expected: Expected, counts: Counts) -> float:
    """Of having the version where it is wanted, as a share of having one that was just used: the less, the more often
    it was brought in vain.
    """
    record = (counts.came + 1) / (counts.came + counts.missed + 1)
    return DOUBT * record * expected.alike / expected.of


class Watch:
    """One version: the pause that it is in, what is expected of it, and whether that was acted upon."""

    def __init__(self, least_s: float) -> None:
        """Pauses up to `least_s` need no foresight: what was used so lately is still there."""
        self._least_s = least_s
        self._busy_s: float | None = None
        self.view: Expected | Unexpected | None = None  # None: in use, or no pause yet
        self.is_brought = False
        self._came = self._early = self._missed = 0

    def __repr__(self) -> str:
        return f"<Watch {self.view} brought={self.is_brought}>"

    @property
    def counts(self) -> Counts:
        """Since it is watched."""
        return Counts(self._came, self._early, self._missed)

    def look(self, pauses: Sequence[float], busy_s: float, now: float, lead_s: float) -> Expected | None:
        """What is due to be acted upon now; None where nothing is. Somebody used the version until `busy_s`."""
        if busy_s != self._busy_s:
            self._end(pauses, lead_s)
            self._busy_s = busy_s
        idle_s = now - busy_s
        if idle_s < LEAST_GAP_S:
            return None
        if self.view is None:
            self.view = expect(pauses, self._least_s)
        elif isinstance(self.view, Expected) and idle_s >= self.view.closes_s:
            self._missed += self.is_brought
            self.is_brought = False
            self.view = expect(pauses, max(idle_s, self._least_s))
        elif isinstance(self.view, Unexpected) and idle_s > (self.view.look_again_s or float("inf")):
            self.view = expect(pauses, max(idle_s, self._least_s))
        if isinstance(self.view, Expected) and not self.is_brought and self.view.is_due(idle_s, lead_s):
            return self.view
        return None

    def brought(self) -> None:
        """What was due was done."""
        self.is_brought = True

    def _end(self, pauses: Sequence[float], lead_s: float) -> None:
        """Somebody came: the pause is the last of `pauses`, where it was one."""
        if isinstance(self.view, Expected):
            if self.is_brought:
                self._came += 1
            elif pauses and pauses[-1] < self.view.opens_s - lead_s:
                self._early += 1
        self.view, self.is_brought = None, False


class Allowance:
    """So many bytes a second on average, and BURST_S of that at once; more may be taken once, and is made up for."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._left = bytes_per_s * BURST_S
        self._at_s: float | None = None

    def __repr__(self) -> str:
        return f"<Allowance left={self._left:.0f}>"

    def try_take(self, nbytes: int, now: float) -> bool:
        """Whether they may be brought now."""
        if self._at_s is not None:
            grown = self._left + max(0.0, now - self._at_s) * self._bytes_per_s
            self._left = min(grown, self._bytes_per_s * BURST_S)
        self._at_s = now
        if self._left <= 0:
            return False
        self._left -= nbytes
        return True
