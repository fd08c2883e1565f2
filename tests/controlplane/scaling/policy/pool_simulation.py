"""Simulate a standby pool on virtual time: takes from a trace, replacements after a delay, and the sizing policy.

Follows `controlplane.scaling.local.standby_pool` with enough cores. A take of a parked standby is a hit, any other
waits for a fork. Forks run in parallel.
"""

import heapq
from collections.abc import Iterable, Iterator
from random import Random

from controlplane.scaling.policy.standby_demand import StandbyDemand
from controlplane.scaling.policy.standby_sizing import PoolLoad, PoolSizing, next_size, target_size

WARM_UP = 1000  # takes during which the policy is still learning


def simulate(
    takes: Iterable[float], replace_s: float, sizing: PoolSizing, *, fixed: int | None = None, fewer: int = 0
) -> tuple[float, int]:
    """Return the share of takes after WARM_UP that found a standby, and the largest pool. `fixed` and `fewer` are
    controls: a pool of that size, or one that much smaller than the policy wants.
    """
    demand, births = StandbyDemand(), list[float]()
    parked = kept = sizing.minimum if fixed is None else fixed
    enough_s, hits, counted, largest = 0.0, 0, 0, kept
    for number, now_s in enumerate(takes):
        while births and births[0] <= now_s:
            demand.record_replacement(heapq.heappop(births))
            parked += 1
            if parked >= kept:
                demand.clear_outstanding()
        demand.record_take(now_s)
        if number >= WARM_UP:
            counted += 1
            hits += parked > 0
        parked -= 1
        if fixed is None:
            wanted = max(1, target_size(sizing, PoolLoad(demand.estimate(now_s), 0, 1)).wanted - fewer)
            before, kept = kept, next_size(kept, wanted, now_s - enough_s)
            if kept != before or wanted >= kept:
                enough_s = now_s
            largest = max(largest, kept)
        parked = min(parked, kept)
        for _ in range(kept - parked - len(births)):
            heapq.heappush(births, now_s + replace_s)
        demand.check_integrity()
    return hits / counted, largest


def poisson(rate: float, count: int, seed: int = 1) -> Iterator[float]:
    """Yield the times of a Poisson process."""
    random, now_s = Random(seed), 0.0
    for _ in range(count):
        now_s += random.expovariate(rate)
        yield now_s


def bursts(every_s: float, mean: float, count: int, seed: int = 1) -> Iterator[float]:
    """Yield bursts at the times of a Poisson process. A burst has a geometric number of takes, a millisecond apart."""
    random, made = Random(seed), 0
    for now_s in poisson(1 / every_s, count, seed + 1):
        size_of_burst = 1
        while random.random() < 1 - 1 / mean:
            size_of_burst += 1
        for position in range(size_of_burst):
            if made == count:
                return
            made += 1
            yield now_s + position / 1000
