"""How many standbys of a device class should be parked, and how many are forked now. Pure; forking is the fleet's work.

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

from controlplane.scaling.policy.standby_demand import DemandEstimate
from kelvin.contracts.backoff import ExponentialBackoff

MIN_TARGET: Final = 0.5  # below the median there is nothing to gain
ASSUMED_BYTES: Final = 40 << 20  # a standby's own memory, until one was measured
SHRINK_S: Final = 60.0  # for so long fewer have to be enough, then one is ended: out at once, in slowly
FORK_BACKOFF: Final = ExponentialBackoff(0.1, 1.0)
RESTORE_CORES: Final = 2  # that a start keeps busy: the runtime, and the agent, zygote or activator that work for it
# A start that takes longer moves bytes: a fork beside it costs it little, an empty pool costs others much.
RESTORE_HOLDS_CORES_S: Final = 1.0
READY_HOLDS_CORES_S: Final = 0.3  # after readiness comes the first prefill, which has the cores as well


class SizeReason(StrEnum):
    """What decided the size: the largest of the wishes, or the bound that cut it."""

    OFF = "off"
    LEAST = "least"
    RATE = "rate"
    BURSTS = "bursts"
    SHARE = "share"
    MOST = "most"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """What an operator wants of a pool. `least` 0: no pool at all."""

    least: int
    maximum: int  # there is no use for more
    target: float  # probability that a start finds a standby; MIN_TARGET or more, below 1
    share: float  # of running replicas, at least
    budget_bytes: int  # for standbys' own memory, at most


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What the pool stands beside."""

    takes: DemandEstimate
    running: int  # replicas of the device class that serve or restore
    standby_bytes: int  # a standby's own memory


@dataclass(frozen=True, slots=True)
class TargetSize:
    """How many standbys there should be, why, and the probability with which a take finds one then."""

    wanted: int
    why: SizeReason
    probability: float


def size(sizing: PoolSizing, load: PoolLoad) -> TargetSize:
    """Return the largest of the wishes, within both bounds."""
    if sizing.least == 0:
        return TargetSize(0, SizeReason.OFF, 0.0)
    takes = load.takes
    mean = takes.per_s * takes.replace_s
    wishes = (
        (sizing.least, SizeReason.LEAST),
        (ceil(sizing.share * load.running), SizeReason.SHARE),
        (standbys_for_rate(mean, sizing.target, sizing.maximum + 1), SizeReason.RATE),
        (standbys_for_history(takes.outstanding_weights, sizing.target), SizeReason.BURSTS),
    )
    wanted, why = max(wishes, key=lambda wish: wish[0])  # the first of equals
    for bound, cut in (
        (sizing.maximum, SizeReason.MOST),
        (sizing.budget_bytes // max(1, load.standby_bytes), SizeReason.BUDGET),
    ):
        if wanted > bound:
            wanted, why = bound, cut
    return TargetSize(
        wanted, why, min(hit_probability_at_rate(mean, wanted), observed_hit_ratio(takes.outstanding_weights, wanted))
    )


def next_size(kept: int, wanted: int, enough_for_s: float) -> int:
    """Return how many to keep now. Shrinks by one once fewer would have been enough for SHRINK_S seconds."""
    if wanted >= kept:
        return wanted
    return kept - 1 if enough_for_s >= SHRINK_S else kept


def hit_probability_at_rate(mean: float, standbys: int) -> float:
    """P(Poisson(mean) < standbys)."""
    term = total = exp(-mean)
    for outstanding in range(1, standbys):
        term *= mean / outstanding
        total += term
    return min(1.0, total) if standbys else 0.0


def standbys_for_rate(mean: float, target: float, maximum: int) -> int:
    """The smallest number that `target` of takes find one of, `maximum` at most."""
    if mean >= maximum:  # a Poisson variable's median is above its mean less ln 2 (Choi 1994)
        return maximum
    term = total = exp(-mean)
    standbys = 1
    while total < target and standbys < maximum:
        term *= mean / standbys
        total += term
        standbys += 1
    return standbys


def observed_hit_ratio(outstanding_weights: Sequence[float], standbys: int) -> float:
    """The share of remembered takes at which no more than `standbys` were outstanding, the take itself included."""
    return sum(outstanding_weights[:standbys]) / sum(outstanding_weights)


def standbys_for_history(outstanding_weights: Sequence[float], target: float) -> int:
    """The smallest number with which that share reaches `target`."""
    needed = target * sum(outstanding_weights)
    return next(
        (count for count, so_far in enumerate(accumulate(outstanding_weights), 1) if so_far >= needed),
        len(outstanding_weights),
    )


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool as it is. `waiting` starts and jobs have no process; `starting` replicas hold cores (`holds_cores`)."""

    size: int
    parked: int
    forked: int  # on their way to be parked
    waiting: int
    starting: int
    cores: int


def holds_cores(since_s: float, *, restoring: bool) -> bool:
    """Whether a replica that began to restore, or to serve, so long ago still has the cores of its start."""
    return since_s < (RESTORE_HOLDS_CORES_S if restoring else READY_HOLDS_CORES_S)


def choose_fork_count(facts: PoolFacts) -> int:
    """Return how many to fork now: for waiting callers at once, for the pool as soon as cores are free of starts.

    A fork and its first imports take a core, and a start that shares its core with them is late by as much. So one
    core is one fork, and a start has its cores first.
    """
    urgent = facts.waiting - facts.forked - facts.parked
    missing = facts.size + urgent
    spare = facts.cores - RESTORE_CORES * facts.starting - facts.forked
    return max(0, urgent, min(missing, spare))


def backoff_s(failures: int) -> float:
    """Return the seconds to wait before the next fork, after so many failed ones in a row: 0.1 s doubled, at most 1 s.

    So a zygote that is back is noticed within a second, and one whose forks die costs at most a fork a second.
    """
    return 0.0 if failures == 0 else FORK_BACKOFF.after(failures)
