"""On a trace of large and small versions, on disk or not, eviction by value waits less for bytes than LRU."""

import random
from collections.abc import Iterable

import pytest

from weightcache.client.lease_protocol import HUGE_PAGE
from weightcache.fetch.tier_model_policy import TierModel, slab_reload_estimator
from weightcache.host.policy.host_index import HostIndex, ReloadEstimator

SLAB = 16 * HUGE_PAGE
CHUNK = 8 << 20
SLABS = 24
STARTS = 300
SPACING_S = 20.0


def trace(seed: int) -> list[list[tuple[str, int]]]:
    """Return versions in the order of their starts: small ones that start often and are only in the store, and large
    ones in turn, as of a batch job, whose chunks are on the disk.
    """
    source = random.Random(seed)
    small = [[(f"small{n}.{i}", CHUNK) for i in range(source.randint(2, 6))] for n in range(16)]
    large = [[(f"large{n}.{i}", CHUNK) for i in range(source.randint(16, 48))] for n in range(12)]
    starts = []
    for number in range(STARTS):
        if number % 3 == 2:
            starts.append(large[number // 3 % len(large)])
        else:
            starts.append(small[min(int(source.expovariate(0.25)), len(small) - 1)])
    return starts


def true_cost() -> ReloadEstimator:
    return slab_reload_estimator(TierModel(), lambda key: key[1].startswith("large"))


def lru(_tenant: str, _chunks: Iterable[tuple[str, int]]) -> float:
    return 1.0


def waited_s(starts: list[list[tuple[str, int]]], reload_s: ReloadEstimator) -> float:
    """Return the seconds that all starts wait for bytes if eviction uses these reload costs."""
    index, cost, waited = HostIndex(SLAB, SLABS, reload_s=reload_s), true_cost(), 0.0
    lengths = {digest: length for version in starts for digest, length in version}
    for number, version in enumerate(starts):
        arrived = index.reserve("a", version, number * SPACING_S)
        for digest in arrived.to_load:
            index.mark_ready("a", digest)
        waited += cost("a", ((digest, lengths[digest]) for digest in arrived.to_load))
        index.unpin(arrived.slabs)
    return waited


def is_better(reload_s: ReloadEstimator, seed: int) -> bool:
    """Return whether eviction by these costs saves more than a fifth of LRU's waiting."""
    starts = trace(seed)
    return waited_s(starts, reload_s) < 0.8 * waited_s(starts, lru)


@pytest.mark.parametrize("seed", range(3))
def test_value_beats_lru(seed: int) -> None:
    assert is_better(true_cost(), seed)


def test_control_lru_and_inverted_costs_are_no_better() -> None:
    """Negative control: neither LRU nor inverted costs are better."""
    cost = true_cost()
    assert not is_better(lru, 0)
    assert not is_better(lambda tenant, chunks: 1 / cost(tenant, chunks), 0)
