"""Hands traces and metrics to a collector from a thread of its own. Nobody waits: what doesn't fit is dropped, counted.

Offering is an append; the thread looks twice a second. Batches are small: making one holds Python's lock, and the
event loop should get it back soon.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from contracts.doubling import is_told
from telemetry.policy.instruments import Family, Page
from telemetry.policy.sampling import Allowance
from telemetry.policy.spans import RequestFacts, RestoreFacts

log = logging.getLogger(__name__)

Facts = RequestFacts | RestoreFacts
LIMIT: Final = 2048
BATCH: Final = 16
LOOK_S: Final = 0.5
TRACES_PER_S: Final = 100.0
BURST: Final = 200.0
FLUSH_S: Final = 1.0


class Collector(Protocol):
    """The OpenTelemetry collector. Calls block, each with its own time limit. Used by one thread."""

    def traces(self, batch: Sequence[Facts]) -> bool:
        """Send traces. Return whether the collector accepted them."""
        ...

    def metrics(self, families: Sequence[Family]) -> bool:
        """Send metrics. Return whether the collector accepted them."""
        ...

    def close(self) -> None:
        """Called from another thread: a call under way gives up soon."""
        ...


class Sender:
    """`make` connects, in the thread: what it imports is slow to import. Open from `start` to `close`."""

    def __init__(self, make: Callable[[], Collector], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._allowance = Allowance(TRACES_PER_S, BURST, clock())
        self._traces: deque[Facts] = deque()
        self._metrics: deque[Sequence[Family]] = deque(maxlen=1)  # totals: the newest says it all
        self._collector: Collector | None = None
        self._closing = threading.Event()
        self._ended = threading.Event()
        self.sent = 0
        self.dropped = 0  # not taken in: too many
        self.lost = 0  # not taken by the collector
        self._failures = 0

    def __repr__(self) -> str:
        return f"<Sender waiting={len(self._traces)} sent={self.sent} dropped={self.dropped} lost={self.lost}>"

    def start(self) -> None:
        """Begin to send."""
        threading.Thread(target=self._run, name="telemetry", daemon=True).start()

    def offer(self, facts: Facts) -> None:
        """Send it some time, if there is room. Never waits."""
        if len(self._traces) >= LIMIT or not self._allowance.take(self._clock()):
            self.dropped += 1
        else:
            self._traces.append(facts)

    def tell(self, families: Sequence[Family]) -> None:
        """Send these metrics, unless newer ones come first."""
        self._metrics.append(families)

    async def close(self, within_s: float = FLUSH_S) -> bool:
        """Send what is queued. Return whether the thread ended within `within_s` seconds; if not, it ends by itself.

        If the collector could not be made, the thread ended before and nothing is sent.
        """
        self._closing.set()
        if await asyncio.to_thread(self._ended.wait, within_s):
            return True
        if self._collector is not None:
            self._collector.close()
        log.warning("telemetry is left unsent", extra={"traces": len(self._traces)})
        return False

    def _run(self) -> None:
        try:
            collector = self._collector = self._make()
            while not self._closing.wait(LOOK_S):
                self._send(collector)
            self._send(collector)
            collector.close()
        except Exception:
            log.exception("telemetry ends; nothing more is sent")
        finally:
            self._ended.set()

    def _send(self, collector: Collector) -> None:
        if self._metrics:
            self._take(partial(collector.metrics, self._metrics.popleft()))
        while self._traces:
            batch = [self._traces.popleft() for _ in range(min(BATCH, len(self._traces)))]
            if self._take(partial(collector.traces, batch)):
                self.sent += len(batch)
            else:
                self.lost += len(batch)

    def _take(self, call: Callable[[], bool]) -> bool:
        """Whether the collector took it. What can't be told at all is lost, and what comes after it is told."""
        defect: Exception | None = None
        try:
            taken = call()
        except Exception as error:
            taken, defect = False, error
        self._failures = 0 if taken else self._failures + 1
        if not taken and is_told(self._failures):
            log.warning("the collector does not take telemetry", extra={"failures": self._failures}, exc_info=defect)
        return taken


async def tell_forever(page: Page, sender: Sender, period_s: float) -> None:
    """Copy the page each period, on the loop that writes it; also after one that could not be copied."""
    failures = 0
    while True:
        await asyncio.sleep(period_s)
        failures = try_tell(page, sender, failures)


def try_tell(page: Page, sender: Sender, failures: int = 0) -> int:
    """Copy the page once. Return how often in a row that has failed: 0, or `failures` and one more."""
    try:
        sender.tell(page.families())
    except Exception:  # of a reading, which asks whatever it likes: no descriptor for a directory, a defect
        failures += 1
        if is_told(failures):
            log.warning("the metrics can't be read", extra={"failures": failures}, exc_info=True)
        return failures
    return 0
