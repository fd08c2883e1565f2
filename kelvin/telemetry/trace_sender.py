"""Send traces to a collector from a separate thread. Callers never wait: traces that don't fit are dropped and counted.

Offering a trace is an append; the thread polls twice a second. Batches are small, because encoding one holds the GIL,
and the event loop should get it back soon.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kelvin.contracts.backoff import should_log
from kelvin.contracts.token_bucket import TokenBucket
from kelvin.telemetry.policy.spans import RequestFacts, RestoreFacts

if TYPE_CHECKING:
    from kelvin.telemetry.otlp import OtlpCollector

log = logging.getLogger(__name__)

TraceFacts = RequestFacts | RestoreFacts
QUEUE_LIMIT: Final = 2048
BATCH: Final = 16
POLL_INTERVAL_S: Final = 0.5
TRACES_PER_S: Final = 100.0
BURST: Final = 200.0
FLUSH_S: Final = 1.0


class TraceSender:
    """Queue and thread, from `start` to `close`. `connect_collector` runs in the thread: its imports are slow."""

    def __init__(
        self, connect_collector: Callable[[], "OtlpCollector"], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect_collector = connect_collector
        self._clock = clock
        self._bucket = TokenBucket()
        self._traces: deque[TraceFacts] = deque()
        self._collector: OtlpCollector | None = None
        self._closing = threading.Event()
        self._ended = threading.Event()
        self.sent = 0
        self.dropped = 0  # not queued: too many
        self._lost = 0
        self._failures = 0

    def __repr__(self) -> str:
        return f"<TraceSender waiting={len(self._traces)} sent={self.sent} dropped={self.dropped} lost={self.lost}>"

    @property
    def lost(self) -> int:
        """Return the number of traces that the collector did not accept, or that wait for a thread that has ended."""
        return self._lost + (len(self._traces) if self._ended.is_set() else 0)

    def start(self) -> None:
        """Start the sending thread."""
        threading.Thread(target=self._run, name="telemetry", daemon=True).start()

    def offer(self, facts: TraceFacts) -> None:
        """Queue the trace if there is room, else drop it. Never waits."""
        now_s, trace_s = self._clock(), 1 / TRACES_PER_S
        if len(self._traces) >= QUEUE_LIMIT or self._bucket.wait_s(1, BURST, trace_s, now_s):
            self.dropped += 1
        else:
            self._bucket.take(1, trace_s, now_s)
            self._traces.append(facts)

    async def close(self, within_s: float = FLUSH_S) -> bool:
        """Send the queued traces. Return whether the thread ended within `within_s` seconds; if not, it ends by itself.
        If the collector could not be created, the thread has ended already and nothing is sent.
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
            collector = self._collector = self._connect_collector()
            while not self._closing.wait(POLL_INTERVAL_S):
                self._send(collector)
            self._send(collector)
            collector.close()
        except Exception:
            log.exception("telemetry ends; nothing more is sent")
        finally:
            self._ended.set()

    def _send(self, collector: "OtlpCollector") -> None:
        while self._traces:
            batch = [self._traces.popleft() for _ in range(min(BATCH, len(self._traces)))]
            if self._try_export(collector, batch):
                self.sent += len(batch)
            else:
                self._lost += len(batch)

    def _try_export(self, collector: "OtlpCollector", batch: Sequence[TraceFacts]) -> bool:
        """Return whether the collector accepted the batch. A batch that can't be encoded is lost, without an error."""
        defect: Exception | None = None
        try:
            accepted = collector.export(batch)
        except Exception as error:
            accepted, defect = False, error
        self._failures = 0 if accepted else self._failures + 1
        if not accepted and should_log(self._failures):
            log.warning("the collector does not take telemetry", extra={"failures": self._failures}, exc_info=defect)
        return accepted
