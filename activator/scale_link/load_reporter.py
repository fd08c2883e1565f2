"""Report each version's concurrency to the decider once a second, and the first request of a version at once.

Knative's rules, whoever decides (`concurrency_policy`); how the decider is told is its sink's.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from activator.routing.policy.version_key import VersionKey
from activator.scale_link.backlogs import Backlogs, RunningRequest
from activator.scale_link.concurrency_policy import ANNOUNCEMENT, ConcurrencyMeter, ConcurrencyReport
from kelvin.contracts.serving.control_messages import ConcurrencyStat
from kelvin.process.loops import Loops

PERIOD_S: Final = 1.0


class ReportSink(Protocol):
    """Tells the decider."""

    @property
    def session(self) -> object | None:
        """One and the same for as long as the decider hears all that is sent, each second's reports among it; None
        where each telling stands for itself, or nobody hears.
        """
        ...

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """Whether they were taken; what was not is never sent later. Within a deadline of its own; safe to cancel."""
        ...


class LoadReporter:
    """Meters of all versions. `run` is its loop. A report that can't be sent is dropped: the next second has another.
    `backlogs` may weigh the reported concurrency.
    """

    def __init__(
        self, sink: ReportSink, backlogs: Backlogs | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sink = sink
        self._backlogs = backlogs or Backlogs()
        self._clock = clock
        self._meters: dict[VersionKey, ConcurrencyMeter] = {}
        self._told: dict[VersionKey, object] = {}  # the session in which a poke was taken
        self._announced: list[VersionKey] = []
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        running = sum(meter.running for meter in self._meters.values())
        return f"<LoadReporter versions={len(self._meters)} running={running} {self._sink}>"

    def begin_request(
        self, key: VersionKey, is_told: Callable[[VersionKey], bool], work: RunningRequest | None = None
    ) -> None:
        """Count a request that arrived. The first one is reported at once, unless `is_told` says that a poke reports
        it. `work` is what is to be computed for it, if anything.
        """
        now = self._clock()
        if work is not None:
            self._backlogs.enter(key, work)
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = ConcurrencyMeter.starting(now)
            meter.begin(now)
            if not is_told(key):
                meter.announce()
                self._announced.append(key)
                self._news.set()
        else:
            meter.begin(now)

    def end_request(self, key: VersionKey, work: RunningRequest | None = None) -> None:
        """It left."""
        if work is not None:
            self._backlogs.leave(key, work)
        self._meters[key].end(self._clock())

    async def send_wake(self, key: VersionKey) -> bool:
        """Report now that the version is wanted, and take that off the next report. Return whether the sink took it.

        Where the decider gets each second's reports one poke is enough, as reports say it from then on.
        """
        session, meter = self._sink.session, self._meters.get(key)
        if session is not None and self._told.get(key) is session:
            return True
        if meter is None and session is not None:  # nobody is inside: the next report says so, and ends it
            meter = self._meters[key] = ConcurrencyMeter.starting(self._clock())
        if meter is not None:
            meter.announce()
        if await self._sink.send((_stat(key, ANNOUNCEMENT),)):
            if session is not None and self._meters.get(key) is meter:  # else a zero has followed it already
                self._told[key] = session
            return True
        if meter is not None:
            meter.withdraw()
        return False

    async def run(self) -> None:
        """Report until cancelled: announcements as they come, everything once a second."""
        async with Loops() as loops:
            loops.start("announcements", self._announce)
            loops.start("reports", self._tick)
            await loops.wait()

    def take_reports(self) -> tuple[ConcurrencyStat, ...]:
        """Every version's report of the time since the last; a version whose last second was empty is forgotten."""
        now, stats = self._clock(), []
        for key, meter in list(self._meters.items()):
            if meter.idle_since_report():
                del self._meters[key]
                self._told.pop(key, None)
            stats.append(_stat(key, meter.report(now, partial(self._backlogs.weigh, key))))
        return tuple(stats)

    async def _announce(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            announced, self._announced = self._announced, []
            if not await self._sink.send(tuple(_stat(key, ANNOUNCEMENT) for key in announced)):
                for key in announced:
                    if (meter := self._meters.get(key)) is not None:
                        meter.withdraw()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + PERIOD_S, loop.time())  # never twice within one second
            await asyncio.sleep(due - loop.time())
            if stats := self.take_reports():
                await self._sink.send(stats)


def _stat(key: VersionKey, report: ConcurrencyReport) -> ConcurrencyStat:
    return ConcurrencyStat(
        tenant=key.tenant,
        model=key.model,
        version=key.version,
        concurrency=report.concurrency,
        requests=report.requests,
    )
