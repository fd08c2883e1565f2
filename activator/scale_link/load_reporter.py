"""Report each version's concurrency to the autoscaler every second, and the first request of a version at once. These
are Knative's rules, for either autoscaler (`concurrency_policy.py`). `report_sinks.py` sends the reports.
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
    """Sends reports to the autoscaler."""

    @property
    def session(self) -> object | None:
        """The current connection. None if each report is a request of its own, or if the autoscaler is away."""
        ...

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """Send reports within a deadline. Return whether they were accepted; others are lost. Safe to cancel."""
        ...


class LoadReporter:
    """The meters of all versions; `run` reports them. A failed report is dropped, since another follows in a second.
    `backlogs` may weigh the reported concurrency.
    """

    def __init__(
        self, sink: ReportSink, backlogs: Backlogs | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sink = sink
        self._backlogs = backlogs or Backlogs()
        self._clock = clock
        self._meters: dict[VersionKey, ConcurrencyMeter] = {}
        self._wake_sessions: dict[VersionKey, object] = {}  # session in which a wake was accepted
        self._announced: list[VersionKey] = []
        self._has_announcements = asyncio.Event()

    def __repr__(self) -> str:
        running = sum(meter.running for meter in self._meters.values())
        return f"<LoadReporter versions={len(self._meters)} running={running} {self._sink}>"

    def begin_request(
        self, key: VersionKey, is_wake_sent: Callable[[VersionKey], bool], running_request: RunningRequest | None = None
    ) -> None:
        """Count a request that arrived. The first one is reported at once, unless `is_wake_sent` returns that a wake
        reports it. `running_request` is the request to weigh, if it computes tokens.
        """
        now = self._clock()
        if running_request is not None:
            self._backlogs.add(key, running_request)
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = ConcurrencyMeter.starting(now)
            meter.begin(now)
            if not is_wake_sent(key):
                meter.announce()
                self._announced.append(key)
                self._has_announcements.set()
        else:
            meter.begin(now)

    def end_request(self, key: VersionKey, running_request: RunningRequest | None = None) -> None:
        """Count a request that left."""
        if running_request is not None:
            self._backlogs.remove(key, running_request)
        self._meters[key].end(self._clock())

    async def send_wake(self, key: VersionKey) -> bool:
        """Report now that the version is needed, and subtract it from the next report. Return whether the sink accepted
        it. One wake per session is enough, because the reports of each second include the waiting requests.
        """
        session, meter = self._sink.session, self._meters.get(key)
        if session is not None and self._wake_sessions.get(key) is session:
            return True
        # No request is counted yet. The next report is 0 and drops this meter.
        if meter is None and session is not None:
            meter = self._meters[key] = ConcurrencyMeter.starting(self._clock())
        if meter is not None:
            meter.announce()
        if await self._sink.send((_stat(key, ANNOUNCEMENT),)):
            if session is not None and self._meters.get(key) is meter:  # otherwise a report of 0 has already followed
                self._wake_sessions[key] = session
            return True
        if meter is not None:
            meter.withdraw_announcement()
        return False

    async def run(self) -> None:
        """Report until cancelled: announcements at once, everything every second."""
        async with Loops() as loops:
            loops.start("announcements", self._announce)
            loops.start("reports", self._tick)
            await loops.wait()

    def take_reports(self) -> tuple[ConcurrencyStat, ...]:
        """Return every version's report since the last call. A version that was idle meanwhile is then dropped."""
        now, stats = self._clock(), []
        for key, meter in list(self._meters.items()):
            if meter.was_idle_since_report():
                del self._meters[key]
                self._wake_sessions.pop(key, None)
            stats.append(_stat(key, meter.report(now, partial(self._backlogs.weigh, key))))
        return tuple(stats)

    async def _announce(self) -> None:
        while True:
            await self._has_announcements.wait()
            self._has_announcements.clear()
            announced, self._announced = self._announced, []
            if not await self._sink.send(tuple(_stat(key, ANNOUNCEMENT) for key in announced)):
                for key in announced:
                    if (meter := self._meters.get(key)) is not None:
                        meter.withdraw_announcement()

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
