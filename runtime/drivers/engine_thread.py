"""The thread that owns an engine. Requests enter through a bounded inbox, events leave through a callback.

Public methods are thread-safe. Only `stop` blocks.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kelvin.contracts.errors import Failure, Internal, Refused, Unavailable
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.traffic_errors import Overloaded
from runtime.drivers.interface import Cancelled, Engine, Event, Failed, Finished, Request

_log = logging.getLogger(__name__)
_RETRY_AFTER_S: Final = 1.0


class EngineThread:
    """The thread that steps one engine. It calls `on_events` and `on_busy`.

    `on_events` may block until the reader has room, as `ThreadBridge.post` does. `on_busy` must not block.
    `on_busy(True)` precedes the first step of a busy period. `on_busy(False)` follows the events that left the engine
    without work. `max_requests` bounds the requests from `submit` to their last event. If the engine still needs its
    probe and no request arrives within `probe_after_s`, the probe runs alone.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_events: Callable[[list[Event]], None],
        on_busy: Callable[[bool], None],
        max_requests: int = 1024,
        probe_after_s: float = 0.25,
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_busy = on_busy
        self._max_requests = max_requests
        self._probe_after_s = probe_after_s
        self._step_raised = False
        self._step_started_s: float | None = None  # only the engine thread writes it
        self._wake = threading.Condition()
        # _wake guards everything below.
        self._inbox: deque[Request] = deque()
        self._cancels: set[str] = set()  # a subset of _inside, so bounded by it
        self._inside: set[str] = set()
        self._stopping: Failure | None = None
        self._poisoned: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __repr__(self) -> str:
        return f"<EngineThread inside={len(self._inside)}/{self._max_requests} {self._engine!r}>"

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Fail every request as Unavailable, then end the thread. Idempotent. Return False if it is still in a step
        after `timeout_s`. It is a daemon thread and ends with the process.
        """
        with self._wake:
            self._stopping = self._stopping or Unavailable("this replica")
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Submit a request. Its outcome arrives as events. Raises `Refused`: Overloaded beyond `max_requests`, the
        failure of a poisoned engine, Unavailable while stopping, Internal for an id that is in use.
        """
        with self._wake:
            refusal = self._poisoned or self._stopping
            if refusal is None and len(self._inside) >= self._max_requests:
                refusal = Overloaded("the engine's inbox", self._max_requests, _RETRY_AFTER_S)
            if refusal is None and request.request_id in self._inside:
                refusal = Internal()
            if refusal is not None:
                raise Refused(refusal)
            self._inside.add(request.request_id)
            self._inbox.append(request)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Cancel a request. `Cancelled` follows, unless another last event came first. Unknown ids are ignored."""
        with self._wake:
            if request_id in self._inside:
                self._cancels.add(request_id)
                self._wake.notify()

    @property
    def stalled_s(self) -> float:
        """Return for how many seconds the engine's step has begun no layer; 0 between steps."""
        since_s = self._step_started_s
        return 0.0 if since_s is None else time.monotonic() - max(since_s, self._engine.last_layer_started_s)

    @property
    def poisoned(self) -> Failure | None:
        """Return why this engine will never serve again; None if it may."""
        return self._poisoned

    def _run(self) -> None:
        busy = False
        try:
            while True:
                requests, cancels, stopping = self._take_inbox()
                if not busy and (requests or self._engine.has_work):
                    busy = True
                    self._on_busy(True)
                self._step_started_s = time.monotonic()
                events = self._run_iteration(requests, cancels, stopping)
                self._step_started_s = None  # delivery may block on a busy event loop; that is no hanging engine
                self._deliver(events)
                if busy and not self._engine.has_work and not self._inbox:
                    busy = False
                    self._on_busy(False)
                if stopping is not None and not self._engine.has_work and not self._inbox:
                    return
        except Exception:
            # Callbacks and engine must not raise. Log the bug, fail all requests inside, and refuse later ones.
            _log.exception("the engine thread ends")
            self._step_started_s = None
            with self._wake:
                self._poisoned = self._poisoned or Internal()
                request_ids = sorted(self._inside)
                self._inside.clear()
            with suppress(Exception):
                self._on_events([Failed(request_id, Internal(), Counts()) for request_id in request_ids])
                self._on_busy(False)

    def _take_inbox(self) -> tuple[list[Request], list[str], Failure | None]:
        """Wait for work, then return everything in the inbox."""
        step_at_s = time.monotonic() + self._engine.batching_delay_s if self._engine.has_work else None
        probe_at_s = time.monotonic() + self._probe_after_s if self._engine.needs_probe else None
        with self._wake:
            while not (self._inbox or self._cancels or self._stopping):
                due_at_s = probe_at_s if step_at_s is None else step_at_s
                remaining_s = None if due_at_s is None else due_at_s - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    break
                self._wake.wait(remaining_s)
            requests, cancels = list(self._inbox), list(self._cancels)
            self._inbox.clear()
            self._cancels.clear()
            return requests, cancels, self._stopping

    def _run_iteration(self, requests: list[Request], cancels: list[str], stopping: Failure | None) -> list[Event]:
        """Apply new requests and cancellations, run one step, and return its events."""
        engine, events = self._engine, list[Event]()
        for request in requests:
            refusal = stopping or engine.admit(request)
            if refusal is not None:
                events.append(Failed(request.request_id, refusal, Counts()))
        for request_id in cancels:
            engine.cancel(request_id)
        if stopping is not None:
            engine.fail_all(stopping)
        if engine.has_work and engine.batching_delay_s > 0:
            return events  # later requests may join this step
        if engine.has_work:
            events.extend(self._step())
        elif engine.needs_probe and not requests and stopping is None:
            engine.run_probe_alone()
        return events

    def _step(self) -> tuple[Event, ...]:
        """Run a step. If one raises, all requests inside fail. A second exception in a row ends the engine."""
        try:
            events = self._engine.step()
            self._step_raised = False
            return events
        except Exception:
            if self._step_raised:
                raise
            _log.exception("a step raised; all its requests fail")
            self._step_raised = True
            self._engine.fail_all(Internal())
            return ()

    def _deliver(self, events: list[Event]) -> None:
        ended = [event.request_id for event in events if isinstance(event, Finished | Failed | Cancelled)]
        with self._wake:
            self._poisoned = self._engine.poisoned
            self._inside.difference_update(ended)
            self._cancels.difference_update(ended)
        if events:
            self._on_events(events)
