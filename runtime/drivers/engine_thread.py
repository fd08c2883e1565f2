"""The thread that owns an engine: requests go in through a bounded inbox, events come out through a callback.

Public methods may be called from any thread. Only `stop` blocks. What a step does is the engine's.
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
    """Drives one engine. `on_events` and `on_busy` are called in this thread: hand over and return.

    `on_busy(True)` comes before the first step of a busy spell, `on_busy(False)` when the engine has run dry, after
    the events that made it so. `limit` bounds the requests that are inside, from `submit` to their last event. Where
    the engine still needs its probe and no request came for `probe_after_s`, the probe runs alone.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_events: Callable[[list[Event]], None],
        on_busy: Callable[[bool], None],
        limit: int = 1024,
        probe_after_s: float = 0.25,
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_busy = on_busy
        self._limit = limit
        self._probe_after_s = probe_after_s
        self._step_raised = False
        self._step_started_s: float | None = None  # the thread's alone to write
        self._wake = threading.Condition()
        # All below is guarded by _wake.
        self._inbox: deque[Request] = deque()
        self._cancels: set[str] = set()  # a subset of _inside, so bounded by it
        self._inside: set[str] = set()
        self._stopping: Failure | None = None
        self._poisoned: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __repr__(self) -> str:
        return f"<EngineThread inside={len(self._inside)}/{self._limit} {self._engine!r}>"

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End every request as Unavailable, then the thread. False where it is still in a step after `timeout_s`: it is
        a daemon, and ends with the process. Idempotent."""
        with self._wake:
            self._stopping = self._stopping or Unavailable("this replica")
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Hand in a request; what becomes of it comes as events. Raises `Refused`: Overloaded where `limit` requests
        are inside, the poison's failure, Unavailable once stopping, Internal for an id that is inside already."""
        with self._wake:
            refusal = self._poisoned or self._stopping
            if refusal is None and len(self._inside) >= self._limit:
                refusal = Overloaded("the engine's inbox", self._limit, _RETRY_AFTER_S)
            if refusal is None and request.request_id in self._inside:
                refusal = Internal()
            if refusal is not None:
                raise Refused(refusal)
            self._inside.add(request.request_id)
            self._inbox.append(request)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """`Cancelled` follows, unless another last event won the race. Unknown ids are ignored."""
        with self._wake:
            if request_id in self._inside:
                self._cancels.add(request_id)
                self._wake.notify()

    @property
    def stalled_s(self) -> float:
        """Return for how many seconds the engine has been in a step without finishing a layer; 0 while it waits."""
        since_s = self._step_started_s
        return 0.0 if since_s is None else time.monotonic() - max(since_s, self._engine.progressed_s)

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
                self._step_started_s = None  # a loop that is behind is no engine that hangs
                self._deliver(events)
                if busy and not self._engine.has_work and not self._inbox:
                    busy = False
                    self._on_busy(False)
                if stopping is not None and not self._engine.has_work and not self._inbox:
                    return
        except Exception:
            # Callbacks and engine promise not to raise: say so loudly, end who is inside, refuse who comes.
            _log.exception("the engine thread ends")
            self._step_started_s = None
            with self._wake:
                self._poisoned = self._poisoned or Internal()
                orphans = sorted(self._inside)
                self._inside.clear()
            with suppress(Exception):
                self._on_events([Failed(request_id, Internal(), Counts()) for request_id in orphans])
                self._on_busy(False)

    def _take_inbox(self) -> tuple[list[Request], list[str], Failure | None]:
        """Wait for something to do, then take all of the inbox."""
        step_at = time.monotonic() + self._engine.batching_delay_s if self._engine.has_work else None
        probe_at = time.monotonic() + self._probe_after_s if self._engine.needs_probe else None
        with self._wake:
            while not (self._inbox or self._cancels or self._stopping):
                due_at = probe_at if step_at is None else step_at
                left = None if due_at is None else due_at - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._wake.wait(left)
            requests, cancels = list(self._inbox), list(self._cancels)
            self._inbox.clear()
            self._cancels.clear()
            return requests, cancels, self._stopping

    def _run_iteration(self, requests: list[Request], cancels: list[str], stopping: Failure | None) -> list[Event]:
        """Apply what came in, step once, return what came out."""
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
            return events  # what comes meanwhile shares its step
        if engine.has_work:
            events.extend(self._step())
        elif engine.needs_probe and not requests and stopping is None:
            engine.run_probe_alone()
        return events

    def _step(self) -> tuple[Event, ...]:
        """A step that raises once costs everyone inside; a second in a row is the engine's end."""
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
