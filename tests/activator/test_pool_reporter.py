"""Who is told of versions and of the pods that they share, in virtual time; and a link to a real WebSocket."""

import asyncio
from collections.abc import Iterable

from activator.autoscaler_link import AutoscalerLink
from activator.pool_reporter import PoolReporter
from activator.reporter import PERIOD_S
from activator.revisions import Revisions
from activator.stat_wire import RevisionStat
from contracts.control import ConcurrencyStat, Feed, PoolRow
from tests.activator.knative_autoscaler import StrictAutoscaler
from tests.activator.test_autoscaler_link import ROWS, UNKNOWN, M, stat
from tests.eventually import eventually
from tests.virtual_loop import run_virtually

POOL = PoolRow(namespace="ns", name="pool-1", share=2.5)


class Heard:
    """Both deciders."""

    def __init__(self) -> None:
        self.stats: list[ConcurrencyStat] = []
        self.told: list[tuple[float, RevisionStat]] = []
        self.takes = True
        self.hangs = False
        self.session = object()

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        if self.hangs:
            await asyncio.Event().wait()
        self.stats.extend(stats)
        return self.takes

    async def tell(self, told: Iterable[RevisionStat]) -> bool:
        now = round(asyncio.get_running_loop().time(), 3)
        self.told.extend((now, each) for each in told)
        return self.takes


def test_who_is_told_of_a_version() -> None:
    """Knative of what has a Revision, the control plane of what has none; without pools all of it is Knative's to hear.
    What one of them doesn't take is not taken.
    """

    async def main() -> None:
        link, control, pools = Heard(), Heard(), [POOL]
        reporter = PoolReporter(link, control, ROWS.get, lambda: tuple(pools))
        own, shared = stat(M, 1.0), stat(UNKNOWN, 2.0)
        assert await reporter.send((own, shared))
        assert (link.stats, control.stats) == ([own], [shared])
        control.takes = False
        assert not await reporter.send((own, shared))
        assert await reporter.send((own,))
        control.hangs, began_s = True, asyncio.get_running_loop().time()
        link.stats.clear()
        assert not await reporter.send((shared, own))
        assert link.stats == [own], "who hangs holds up nobody"
        assert asyncio.get_running_loop().time() - began_s < PERIOD_S
        pools.clear()
        link.stats.clear()
        await reporter.send((shared,))
        assert link.stats == [shared]

    run_virtually(main())


def test_pods_are_told_each_second() -> None:
    """What the feed said last, whether or not it still says anything; nothing where there is no pool."""

    async def main() -> None:
        link, seen = Heard(), Revisions()
        reporter = PoolReporter(link, Heard(), seen.of, lambda: seen.pools)
        running = asyncio.create_task(reporter.run())
        await asyncio.sleep(1.5)
        assert link.told == []
        seen.apply(Feed(revision=1, full=True, pools=(POOL,)))
        seen.apply(Feed(revision=2))
        await asyncio.sleep(3)
        seen.apply(Feed(revision=3, full=True))
        await asyncio.sleep(3)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert link.told == [(at, RevisionStat("ns", "pool-1", 2.5, 0)) for at in (2.0, 3.0, 4.0)]

    run_virtually(main())


def test_the_autoscaler_hears_it() -> None:
    """As it hears of a version's Revision; while it is away nobody does, and nothing is kept."""

    async def main() -> None:
        server = StrictAutoscaler("ns/pool-1")
        await server.start()
        link = AutoscalerLink(server.url, "activator-7", ROWS.get)
        told = [RevisionStat(POOL.namespace, POOL.name, POOL.share, 0)]
        assert not await link.tell(told)
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.is_open)
        assert await link.tell(told)
        await eventually(lambda: bool(server.stats))
        assert [each[1:] for each in server.stats] == [(0, "ns/pool-1", "activator-7", 2.5, 0.0)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop()
        assert server.wrong == []

    asyncio.run(main())
