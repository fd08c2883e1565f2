"""Hedged reads from a real S3 server behind a proxy: a slow connection is overtaken, a slow store gets few hedges."""

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest

from kelvin.blobstore.retrying_store import RetryingStore
from tests.faults.http_faults import DelayedAnswer, Fault, StalledBody
from tests.faults.s3_buckets import ENVIRONMENT, Buckets
from tests.kelvin.blobstore.s3_world import World, worlds
from weightcache.counters import Counters
from weightcache.sources.policy.bdp_window import BdpWindow
from weightcache.sources.policy.read_hedging import MIN_SAMPLES, HedgeRule, ReadHedging
from weightcache.sources.source import UNLIMITED_READ_SLOT
from weightcache.sources.store_ranges import StoreRanges

pytestmark = pytest.mark.deep

BODY = random.Random(2).randbytes(600_000)


@pytest.fixture(scope="module")
def s3(buckets: Buckets) -> Iterator[World]:
    """One proxy and one client for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with worlds(buckets) as world:
            yield world


@pytest.fixture
def world(s3: World) -> Iterator[World]:
    """An empty bucket with one object, without faults or recorded requests."""
    s3.begin()
    s3.plant("t/a", BODY)
    yield s3
    s3.end()


def ranges_with_hedges(world: World, share: float) -> tuple[StoreRanges, Counters]:
    """Return ranges that have seen enough quick reads to hedge the first late one."""
    hedging, counters = ReadHedging(HedgeRule(share=share)), Counters()
    for _ in range(MIN_SAMPLES):
        hedging.begin_read(len(BODY))
        hedging.record_read(len(BODY), 0.01)
    return StoreRanges(RetryingStore(world.store()), hedging, BdpWindow(40), counters), counters


async def read_bodies(ranges: StoreRanges, buffers: Sequence[bytearray]) -> None:
    """Fill all buffers at once. Fails sooner than the client, whose timeout is a minute."""
    async with asyncio.timeout(30):
        reads = (ranges.read("t/a", 0, memoryview(buffer), UNLIMITED_READ_SLOT) for buffer in buffers)
        await asyncio.gather(*reads)


@pytest.mark.parametrize("fault", [DelayedAnswer(), StalledBody(300_000)], ids=["no head", "half a body"])
def test_slow_connection_is_overtaken_by_the_hedge(world: World, fault: Fault) -> None:
    """The hedged read finishes while the first read still waits. The first one writes nothing afterwards."""
    ranges, counters = ranges_with_hedges(world, 0.1)
    into = bytearray(len(BODY))
    world.proxy.inject(fault, method="GET")
    asyncio.run(read_bodies(ranges, [into]))
    assert bytes(into) == BODY
    assert (counters.hedges, counters.hedges_won) == (1, 1)
    assert world.proxy.count("GET") == 2
    into[:] = bytes(len(into))
    world.proxy.lift()
    world.end()  # waits for the late answer to end
    assert not any(into)


def test_slow_store_gets_few_hedges(world: World) -> None:
    """Of forty late reads, at most one in twenty is hedged, plus the saved budget."""
    ranges, counters = ranges_with_hedges(world, 0.05)
    world.proxy.inject(DelayedAnswer(0.3), method="GET", times=None)
    asyncio.run(read_bodies(ranges, [bytearray(len(BODY)) for _ in range(40)]))
    assert counters.hedges <= 3
    assert 40 <= world.proxy.count("GET") <= 40 + counters.hedges
