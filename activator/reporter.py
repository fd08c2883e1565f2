"""Report each version's concurrency to the decider once a second, and the first request of a version at once."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from activator import dependencies
from activator.keys import VersionKey
from activator.policy.concurrency import ConcurrencyMeter, Report
from contracts.control import ConcurrencyStat, Stats
from contracts.errors import Refused
from service.client import ServiceClient

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
POST_TIMEOUT_S: Final = dependencies.STATS.timeout_s
PATH: Final = "/internal/v1/stats"


class Reporter:
    """All versions' meters. `run` is its loop; what can't be posted is dropped, as the next second tells anew."""

    def __init__(self, control: ServiceClient, activator: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._control = control
        self._activator = activator
        self._clock = clock
        self._meters: dict[VersionKey, ConcurrencyMeter] = {}
        self._announced: list[ConcurrencyStat] = []
        self._news = asyncio.Event()
        self._failures = 0

    def __repr__(self) -> str:
        running = sum(meter.running for meter in self._meters.values())
        return f"<Reporter versions={len(self._meters)} running={running} failures={self._failures}>"

    def began(self, key: VersionKey, is_told: Callable[[VersionKey], bool]) -> None:
        """A request arrived. A first one is told at once, unless waking the version tells it: then `is_told`."""
        now = self._clock()
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = ConcurrencyMeter.starting(now)
            meter.begin(now)
            if not is_told(key):
                self._announced.append(_stat(key, meter.announce()))
                self._news.set()
        else:
            meter.begin(now)

    def ended(self, key: VersionKey) -> None:
        """It left."""
        self._meters[key].end(self._clock())

    async def poke(self, key: VersionKey) -> bool:
        """Tell now that the version is wanted; what is told is taken off the next report. Whether it was taken."""
        meter = self._meters.get(key)
        report = Report(1.0, 0) if meter is None else meter.announce()
        return await self._post((_stat(key, report),))

    async def run(self) -> None:
        """Report until cancelled: announcements as they come, everything once a second."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._announce())
            tasks.create_task(self._tick())

    def take_reports(self) -> tuple[ConcurrencyStat, ...]:
        """Every version's report of the time since the last; a version whose last second was empty is forgotten."""
        now, stats = self._clock(), []
        for key, meter in list(self._meters.items()):
            if meter.idle_since_report():
                del self._meters[key]
            stats.append(_stat(key, meter.report(now)))
        return tuple(stats)

    async def _announce(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            stats, self._announced = tuple(self._announced), []
            await self._post(stats)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + PERIOD_S, loop.time())  # never twice within one second
            await asyncio.sleep(due - loop.time())
            if stats := self.take_reports():
                await self._post(stats)

    async def _post(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        body = Stats(activator=self._activator, stats=stats)
        try:
            await self._control.call("POST", PATH, type(None), body=body, timeout_s=POST_TIMEOUT_S)
        except Refused as refused:
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                log.warning("stats are not taken", extra={"error": str(refused), "failures": self._failures})
            return False
        self._failures = 0
        return True


def _stat(key: VersionKey, report: Report) -> ConcurrencyStat:
    return ConcurrencyStat(
        tenant=key.tenant,
        model=key.model,
        version=key.version,
        concurrency=report.concurrency,
        requests=report.requests,
    )
