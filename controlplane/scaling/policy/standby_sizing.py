"""Decide how many standbys of a device class to park, and how many to fork now. Pure; `scaling/local/fleet.py` forks.

Each take of a standby causes a fork in its place. If takes are a Poisson process, the number outstanding is Poisson
distributed with mean rate x time, whatever the distribution of that time (Palm 1938; the stock of a base-stock policy).
A take then finds a standby if fewer than n are outstanding. Takes in bursts are not a Poisson process, so the observed
quantile is used as well.
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
SHRINK_S: Final = 60.0  # end a surplus standby only after so long: grow at once, shrink slowly
FORK_BACKOFF: Final = ExponentialBackoff(0.1, 1.0)
RESTORE_CORES: Final = 2  # busy cores of a start: the runtime, and the agent, zygote or activator at work for it
# A start that takes longer is moving bytes. A fork then costs it little, and an empty pool costs other starts much.
RESTORE_HOLDS_CORES_S: Final = 1.0
READY_HOLDS_CORES_S: Final = 0.3  # after readiness comes the first prefill, which needs the cores as well


class SizeReason(StrEnum):
    """The demand or the bound that decided the size."""

    OFF = "off"
    LEAST = "least"
    RATE = "rate"
    BURSTS = "bursts"
    SHARE = "share"
    MOST = "most"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """An operator's settings of a pool. A `minimum` of 0 turns the pool off."""

    minimum: int
    maximum: int  # more are never useful
    target: float  # probability that a start finds a standby; from MIN_TARGET to below 1
    share: float  # at least this fraction of the running replicas
    budget_bytes: int  # at most so much for standbys' own memory


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The load that the pool must serve."""

    takes: DemandEstimate
    running: int  # replicas of the device class that serve or restore
    standby_bytes: int  # a standby's own memory


@dataclass(frozen=True, slots=True)
class TargetSize:
    """The desired number of standbys, the reason, and the probability that a take then finds one."""

    wanted: int
    reason: SizeReason
    probability: float


def target_size(sizing: PoolSizing, load: PoolLoad) -> TargetSize:
    """Return the largest of the demands, within both bounds."""
    if sizing.minimum == 0:
        return TargetSize(0, SizeReason.OFF, 0.0)
    takes = load.takes
    mean = takes.per_s * takes.replace_s
    demands = (
        (sizing.minimum, SizeReason.LEAST),
        (ceil(sizing.share * load.running), SizeReason.SHARE),
        (standbys_for_rate(mean, sizing.target, sizing.maximum + 1), SizeReason.RATE),
        (standbys_for_history(takes.outstanding_weights, sizing.target), SizeReason.BURSTS),
    )
    wanted, reason = max(demands, key=lambda demand: demand[0])  # the first of equals
    for bound, bound_reason in (
        (sizing.maximum, SizeReason.MOST),
        (sizing.budget_bytes // max(1, load.standby_bytes), SizeReason.BUDGET),
    ):
        if wanted > bound:
            wanted, reason = bound, bound_reason
    return TargetSize(
        wanted,
        reason,
        min(hit_probability_at_rate(mean, wanted), observed_hit_ratio(takes.outstanding_weights, wanted)),
    )


def next_size(kept: int, wanted: int, enough_for_s: float) -> int:
    """Return how many to keep now. Shrinks by one after SHRINK_S seconds in which fewer would have been enough."""
    if wanted >= kept:
        return wanted
    return kept - 1 if enough_for_s >= SHRINK_S else kept


def hit_probability_at_rate(mean: float, standbys: int) -> float:
    """Return P(Poisson(mean) < standbys)."""
    term = total = exp(-mean)
    for outstanding in range(1, standbys):
        term *= mean / outstanding
        total += term
    return min(1.0, total) if standbys else 0.0


def standbys_for_rate(mean: float, target: float, maximum: int) -> int:
    """Return the smallest number of standbys with which a fraction `target` of takes is served, `maximum` at most."""
    if mean >= maximum:  # the median of a Poisson variable is above its mean less ln 2 (Choi 1994)
        return maximum
    term = total = exp(-mean)
    standbys = 1
    while total < target and standbys < maximum:
        term *= mean / standbys
        total += term
        standbys += 1
    return standbys


def observed_hit_ratio(outstanding_weights: Sequence[float], standbys: int) -> float:
    """Return the fraction of remembered takes with at most `standbys` outstanding, the take itself included."""
    return sum(outstanding_weights[:standbys]) / sum(outstanding_weights)


def standbys_for_history(outstanding_weights: Sequence[float], target: float) -> int:
    """Return the smallest number of standbys with which the observed hit ratio reaches `target`."""
    needed = target * sum(outstanding_weights)
    return next(
        (count for count, so_far in enumerate(accumulate(outstanding_weights), 1) if so_far >= needed),
        len(outstanding_weights),
    )


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool now. `waiting` starts and jobs have no process; `starting` replicas hold cores (see `holds_cores`)."""

    size: int
    parked: int
    forked: int  # forks that are not parked yet
    waiting: int
    starting: int
    cores: int


def holds_cores(since_s: float, *, restoring: bool) -> bool:
    """Return whether a replica still needs its start's cores, `since_s` seconds after it began to restore or serve."""
    return since_s < (RESTORE_HOLDS_CORES_S if restoring else READY_HOLDS_CORES_S)


def choose_fork_count(facts: PoolFacts) -> int:
    """Return how many to fork now: for waiting callers at once, for the pool only when starts leave cores free.

    A fork and its first imports take one core. A start that shares its core with a fork is late by that time. So each
    fork counts as one core, and starts get their cores first.
    """
    urgent = facts.waiting - facts.forked - facts.parked
    missing = facts.size + urgent
    spare = facts.cores - RESTORE_CORES * facts.starting - facts.forked
    return max(0, urgent, min(missing, spare))


def backoff_s(failures: int) -> float:
    """Return the seconds to wait before the next fork, after `failures` failed ones in a row: 0.1 s doubled, at most 1
    s. So a returned zygote is noticed within a second, and one whose forks die costs at most one fork a second.
    """
    return 0.0 if failures == 0 else FORK_BACKOFF.delay_s(failures)
