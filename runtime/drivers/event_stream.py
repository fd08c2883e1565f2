"""Carry one request's events from the engine to its response. All of it runs on the event loop.

Back-pressure: while the client's connection accepts nothing, tokens wait here. They are sent as one piece later. The
engine does not pause for a reader. If MAX_TOKENS wait and the oldest has waited for SLOW_READER_S, the request is
cancelled as `SlowReader`. Neither condition is enough alone: a reader that did not get the CPU for a moment isn't slow.
A reader takes all waiting events at once. So a stream holds at most MAX_TOKENS, or the tokens that the engine makes in
SLOW_READER_S if they are more.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.traffic_errors import Cancelled, Overloaded, SlowReader
from runtime.drivers import interface
from runtime.drivers.interface import Event, Failed, Finished, Generated, Request

MAX_TOKENS: Final = 1024
SLOW_READER_S: Final = 5.0
MAX_STREAMS: Final = 4096


class EventStream:
    """The events of one request. Always call `stop` at the end, so that the engine releases the request."""

    def __init__(
        self,
        serial: str,
        cancel: Callable[[str], None],
        max_tokens: int = MAX_TOKENS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serial = serial
        self._cancel = cancel
        self._max_tokens = max_tokens
        self._now_s = now_s
        self._events: deque[Event] = deque()
        self._oldest_event_s = 0.0  # arrival of the oldest waiting event
        self._has_events = asyncio.Event()
        self._failure: Failure | None = None
        self.is_released = False  # whether the engine's last event has arrived
        self._cost: Counts | None = None  # the request's total cost, from its last event
        self._waiter: asyncio.Future[None] | None = None  # for the release by the engine

    def __repr__(self) -> str:
        state = "released" if self.is_released else "running"
        return f"<EventStream {self.serial} {state} waiting={len(self._events)}{' abandoned' if self._failure else ''}>"

    @property
    def abandon_failure(self) -> Failure | None:
        """Return why this stream was abandoned; None if it was not."""
        return self._failure

    def push(self, event: Event) -> None:
        """Accept an event of the engine. After `abandon`, only the event that releases the request has an effect."""
        if isinstance(event, Finished | Failed | interface.Cancelled):
            self._cost = event.counts
            self.mark_released()
        if self._failure is not None:
            return
        if isinstance(event, interface.Cancelled):
            self.abandon(Cancelled())  # the engine cancelled it without a call from here
        elif isinstance(event, Generated) and self._is_slow():
            self.abandon(SlowReader(self._max_tokens))
        else:
            if not self._events:
                self._oldest_event_s = self._now_s()
            self._events.append(event)
            self._has_events.set()

    def _is_slow(self) -> bool:
        return len(self._events) >= self._max_tokens and self._now_s() - self._oldest_event_s >= SLOW_READER_S

    def mark_released(self) -> None:
        """Record that the engine holds nothing for this request any longer."""
        self.is_released = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def final_cost(self, timeout_s: float) -> Counts | None:
        """Wait until the engine has released the request, and return its total cost. Return None after `timeout_s`, or
        if the engine ended without reporting the cost.
        """
        if not self.is_released:
            self._waiter = self._waiter or asyncio.get_running_loop().create_future()
            await asyncio.wait((self._waiter,), timeout=timeout_s)
        return self._cost

    def abandon(self, failure: Failure) -> None:
        """End the stream and cancel the request in the engine. `next_events` raises the first failure given here."""
        if self._failure is not None:
            return
        self._failure = failure
        self._events.clear()
        self._has_events.set()
        self.stop()

    def stop(self) -> None:
        """Cancel the request in the engine unless it is released. Idempotent."""
        if not self.is_released:
            self._cancel(self.serial)

    async def next_events(self, timeout_s: float) -> list[Event]:
        """Return all waiting events, at least one, or [] after `timeout_s`. Raises `Refused` once abandoned."""
        if not self._has_events.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._has_events.wait()
            except TimeoutError:
                return []
        if self._failure is not None:
            raise Refused(self._failure)
        events = list(self._events)
        self._events.clear()
        self._has_events.clear()
        return events


class EventStreams:
    """All requests of one replica, from `open` until the engine has released them.

    `submit` passes a request to the engine's thread or raises `Refused`. Its events follow; the last one is Finished,
    Failed or Cancelled. `cancel` ignores unknown and ended ids.
    """

    def __init__(
        self, submit: Callable[[Request], None], cancel: Callable[[str], None], max_tokens: int = MAX_TOKENS
    ) -> None:
        self._submit = submit
        self._cancel = cancel
        self._max_tokens = max_tokens
        self._streams: dict[str, EventStream] = {}
        self._last_serial = 0

    def __repr__(self) -> str:
        return f"<EventStreams {len(self._streams)}>"

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: Request) -> EventStream:
        """Submit a request under a unique serial, since a retry may overlap its first attempt. Raises `Refused`."""
        if len(self._streams) >= MAX_STREAMS:
            raise Refused(Overloaded("this replica", MAX_STREAMS, 1.0, "streams"))
        self._last_serial += 1
        serial = f"{request.request_id}#{self._last_serial}"
        self._submit(replace(request, request_id=serial))
        stream = self._streams[serial] = EventStream(serial, self._cancel, self._max_tokens)
        return stream

    def dispatch(self, events: list[Event]) -> None:
        """Pass the engine's events to their streams. Events of unknown requests are dropped."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.push(event)
            if stream.is_released:
                del self._streams[event.request_id]

    def abandon_all(self, failure: Failure) -> None:
        """Abandon all streams. The engine cancels the requests and reports their costs."""
        for stream in self._streams.values():
            stream.abandon(failure)

    def release_all(self, failure: Failure) -> None:
        """End all streams without the engine, which has failed or hangs and may never release them."""
        for stream in self._streams.values():
            stream.mark_released()
            stream.abandon(failure)
        self._streams.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if the table holds a released stream."""
        for serial, stream in self._streams.items():
            assert stream.serial == serial, f"{stream} is filed as {serial}"
            assert not stream.is_released, f"{stream} should have been removed"
