"""How many standbys of a device class should be parked. Pure; which are forked when is `pool`'s to say.

Each take of a standby has one forked in its place. Where takes are a Poisson process, the number that is outstanding is
Poisson distributed with the mean rate x time, whatever the distribution of that time (Palm 1938; the stock of a base-
stock policy), and a take finds one of n where fewer than n are outstanding. Takes that come in bursts are no Poisson
process: beside that quantile stands the one that was seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import ceil, exp
from typing import Final

from controlplane.policy.demand import Takes

LEAST_TARGET: Final = 0.5  # below the median there is nothing to gain
ASSUMED_BYTES: Final = 40 << 20  # a standby's own memory, until one was measured
SHRINK_S: Final = 60.0  # for so long fewer have to be enough, then one is ended: out at once, in slowly


class Why(StrEnum):
    """What decided the size: the largest of the wishes, or the bound that cut it."""

    OFF = "off"
    LEAST = "least"
    RATE = "rate"
    BURSTS = "bursts"
    SHARE = "share"
    MOST = "most"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Sizing:
    """What an operator wants of a pool. `least` 0: no pool at all."""

    least: int
    most: int  # there is no use for more
    target: float  # probability that a start finds a standby; LEAST_TARGET or more, below 1
    share: float  # of running replicas, at least
    budget_bytes: int  # for standbys' own memory, at most


@dataclass(frozen=True, slots=True)
class Load:
    """What the pool stands beside."""

    takes: Takes
    running: int  # replicas of the device class that serve or restore
    standby_bytes: int  # a standby's own memory


@dataclass(frozen=True, slots=True)
class Size:
    """So many, for that reason; with so many a take finds one with that probability."""

    wanted: int
    why: Why
    probability: float


def size(sizing: Sizing, load: Load) -> Size:
    """The largest wish, within both bounds."""
    if sizing.least == 0:
        return Size(0, Why.OFF, 0.0)
    takes = load.takes
    mean = takes.per_s * takes.replace_s
    wishes = (
        (sizing.least, Why.LEAST),
        (ceil(sizing.share * load.running), Why.SHARE),
        (enough_for_rate(mean, sizing.target, sizing.most + 1), Why.RATE),
        (enough_as_seen(takes.together, sizing.target), Why.BURSTS),
    )
    wanted, why = max(wishes, key=lambda wish: wish[0])  # the first of equals
    for bound, cut in ((sizing.most, Why.MOST), (sizing.budget_bytes // max(1, load.standby_bytes), Why.BUDGET)):
        if wanted > bound:
            wanted, why = bound, cut
    return Size(wanted, why, min(found_at_rate(mean, wanted), found_as_seen(takes.together, wanted)))


def next_size(kept: int, wanted: int, enough_for_s: float) -> int:
    """How many to keep now, where for so long fewer than are kept would have been enough."""
    if wanted >= kept:
        return wanted
    return kept - 1 if enough_for_s >= SHRINK_S else kept


def found_at_rate(mean: float, standbys: int) -> float:
    """P(Poisson(mean) < standbys)."""
    term = total = exp(-mean)
    for outstanding in range(1, standbys):
        term *= mean / outstanding
        total += term
    return min(1.0, total) if standbys else 0.0


def enough_for_rate(mean: float, target: float, most: int) -> int:
    """The smallest number that `target` of takes find one of, `most` at most."""
    if mean >= most:  # a Poisson variable's median is above its mean less ln 2 (Choi 1994)
        return most
    term = total = exp(-mean)
    standbys = 1
    while total < target and standbys < most:
        term *= mean / standbys
        total += term
        standbys += 1
    return standbys


def found_as_seen(together: Sequence[float], standbys: int) -> float:
    """The share of remembered takes at which no more than `standbys` were outstanding, the take itself included."""
    return sum(together[:standbys]) / sum(together)


def enough_as_seen(together: Sequence[float], target: float) -> int:
    """The smallest number with which that share reaches `target`."""
    needed = target * sum(together)
    return next((count for count, so_far in enumerate(accumulate(together), 1) if so_far >= needed), len(together))
