"""PoolReporter on virtual time: stats of versions and shared pods go to the right decider. One test uses a real Redis,
one a real WebSocket.
"""

import asyncio
from collections.abc import Iterable

import pytest

from activator.limits import redis_store
from activator.limits.limit_counters import open_limit_counters
from activator.limits.redis_store import open_store
from activator.routing.revisions import Revisions
from activator.scale_link.autoscaler_link import AutoscalerLink
from activator.scale_link.load_reporter import PERIOD_S
from activator.scale_link.pool_reporter import PoolReporter
from activator.scale_link.stat_encoding import RevisionStat
from kelvin.contracts.serving.control_messages import ConcurrencyStat, Feed, PoolRow
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.activator.redis_server import RedisServer
from tests.activator.scale_link.knative_autoscaler import StrictAutoscaler
from tests.activator.scale_link.test_autoscaler_link import ROWS, UNKNOWN, M, stat
from tests.eventually import eventually

POOL = PoolRow(namespace="ns", name="pool-1", share=2.5, wanted=5)


class RecordingDecider:
    """A decider that records what it receives, as Knative or as the control plane."""

    def __init__(self) -> None:
        self.stats: list[ConcurrencyStat] = []
        self.received: list[tuple[float, RevisionStat]] = []
        self.takes = True
        self.hangs = False
        self.session = object()

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        if self.hangs:
            await asyncio.Event().wait()
        self.stats.extend(stats)
        return self.takes

    async def send_revision_stats(self, received: Iterable[RevisionStat]) -> bool:
        now = round(asyncio.get_running_loop().time(), 3)
        self.received.extend((now, each) for each in received)
        return self.takes


@pytest.mark.virtual_time
async def test_stats_go_to_knative_or_the_control_plane() -> None:
    """Knative gets versions with a Revision, the control plane the others. Without pools Knative gets all. A stat that
    its decider does not accept counts as not sent.
    """

    link, control, pools = RecordingDecider(), RecordingDecider(), [POOL]
    reporter = PoolReporter(link, link.send_revision_stats, control, ROWS.get, lambda: tuple(pools), lambda: None)
    own, shared = stat(M, 1.0), stat(UNKNOWN, 2.0)
    assert await reporter.send((own, shared))
    assert (link.stats, control.stats) == ([own], [shared])
    control.takes = False
    assert not await reporter.send((own, shared))
    assert await reporter.send((own,))
    control.hangs, began_s = True, asyncio.get_running_loop().time()
    link.stats.clear()
    assert not await reporter.send((shared, own))
    assert link.stats == [own], "a hanging decider delays no other"
    assert asyncio.get_running_loop().time() - began_s < PERIOD_S
    pools.clear()
    link.stats.clear()
    await reporter.send((shared,))
    assert link.stats == [shared]


@pytest.mark.virtual_time
async def test_pods_are_told_each_second() -> None:
    """The last line's share is reported each second, even if the feed is silent. Without a pool there is none."""

    link, seen = RecordingDecider(), Revisions()
    reporter = PoolReporter(
        link, link.send_revision_stats, RecordingDecider(), seen.find_revision, lambda: seen.pools, lambda: None
    )
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(1.5)
    assert link.received == []
    seen.apply(Feed(revision=1, full=True, pools=(POOL,)))
    seen.apply(Feed(revision=2))
    await asyncio.sleep(3)
    seen.apply(Feed(revision=3, full=True))
    await asyncio.sleep(3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert link.received == [(at, RevisionStat("ns", "pool-1", 2.5, 0)) for at in (2.0, 3.0, 4.0)]


@pytest.mark.virtual_time
async def test_live_activators_report_a_dead_ones_share() -> None:
    """If the number of live activators is known, they report the whole while the control plane is silent. Control:
    otherwise each reports its last share.
    """

    link, activator_count = RecordingDecider(), list[int | None]((None,))
    reporter = PoolReporter(
        link, link.send_revision_stats, RecordingDecider(), ROWS.get, lambda: (POOL,), lambda: activator_count[-1]
    )
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(PERIOD_S / 2)  # between two reports
    for now in (None, 2, 1, None):
        activator_count.append(now)
        await asyncio.sleep(PERIOD_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [each.concurrency for _, each in link.received] == [2.5, 2.5, 5.0, 2.5]


async def test_live_activators_are_counted_by_redis(monkeypatch: pytest.MonkeyPatch, redis: RedisServer) -> None:
    """A silent activator is no longer counted. Without Redis, or while it is down, the number is unknown."""
    monkeypatch.setattr(redis_store, "SILENT_S", 1.0)

    async with open_limit_counters(None, "one", MetricsPage("activator")) as alone:
        assert alone.activator_count() is None
    async with asyncio.timeout(60), open_limit_counters(redis.url, "one", MetricsPage("activator")) as one:
        assert one.store is not None
        assert one.activator_count() == 1
        async with open_store(redis.url, "two") as two:
            await two.send_heartbeat()
            await one.store.send_heartbeat()
            assert one.activator_count() == 2
        while one.activator_count() != 1:
            await one.store.send_heartbeat()
            await asyncio.sleep(0.01)
        redis.kill()
        await one.store.send_heartbeat()
        assert one.activator_count() is None


async def test_autoscaler_receives_pool_stats() -> None:
    """While the autoscaler is down nothing is sent or kept."""

    server = StrictAutoscaler("ns/pool-1")
    await server.start()
    link = AutoscalerLink(server.url, "activator-7", ROWS.get)
    received = [RevisionStat(POOL.namespace, POOL.name, POOL.share, 0)]
    assert not await link.send_revision_stats(received)
    running = asyncio.create_task(link.run())
    await eventually(lambda: link.is_open)
    assert await link.send_revision_stats(received)
    await eventually(lambda: bool(server.stats))
    assert [each[1:] for each in server.stats] == [(0, "ns/pool-1", "activator-7", 2.5, 0.0)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop()
    assert server.wrong == []
