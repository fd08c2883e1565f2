"""One request's events between the engine and its answer: bounded, and ended by whoever has a reason first.

Backpressure: tokens wait here while the client's connection takes none, and go out as one piece when it does. The
engine does not pause for a reader. Where MAX_TOKENS wait, and the oldest has waited for SLOW_READER_S, the request is
cancelled as `SlowReader`. A reader that gets no processor for a moment is not slow, however fast the engine is. A
reader takes all that waits at once, so a stream holds at most what the engine makes in SLOW_READER_S, or MAX_TOKENS.
All of it happens on the event loop.
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
    """The events of one request. Always call `stop` at the end: the engine then lets go of the request."""

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
        self._oldest_event_s = 0.0  # the oldest event, where any waits
        self._has_events = asyncio.Event()
        self._failure: Failure | None = None
        self.is_released = False  # by the engine: its last event came
        self._cost: Counts | None = None  # what the request had cost by then
        self._waiter: asyncio.Future[None] | None = None  # for the engine's letting go

    def __repr__(self) -> str:
        state = "released" if self.is_released else "running"
        return f"<EventStream {self.serial} {state} waiting={len(self._events)}{' abandoned' if self._failure else ''}>"

    @property
    def abandon_failure(self) -> Failure | None:
        """Return why this stream was abandoned; None if it was not."""
        return self._failure

    def push(self, event: Event) -> None:
        """Take in an event of the engine. After `abandon` only the one that releases the request counts."""
        if isinstance(event, Finished | Failed | interface.Cancelled):
            self._cost = event.counts
            self.release()
        if self._failure is not None:
            return
        if isinstance(event, interface.Cancelled):
            self.abandon(Cancelled())  # by nobody here
        elif isinstance(event, Generated) and self._is_slow():
            self.abandon(SlowReader(self._max_tokens))
        else:
            if not self._events:
                self._oldest_event_s = self._now_s()
            self._events.append(event)
            self._has_events.set()

    def _is_slow(self) -> bool:
        return len(self._events) >= self._max_tokens and self._now_s() - self._oldest_event_s >= SLOW_READER_S

    def release(self) -> None:
        """Record that the engine holds nothing for this request any longer."""
        self.is_released = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def final_cost(self, timeout_s: float) -> Counts | None:
        """Wait until the engine has released the request and return its total cost; None if that takes too long or the
        engine ended without reporting it.
        """
        if not self.is_released:
            self._waiter = self._waiter or asyncio.get_running_loop().create_future()
            await asyncio.wait((self._waiter,), timeout=timeout_s)
        return self._cost

    def abandon(self, failure: Failure) -> None:
        """End it from this side: the first reason stands, `take` raises it, the engine is told at once."""
        if self._failure is not None:
            return
        self._failure = failure
        self._events.clear()
        self._has_events.set()
        self.stop()

    def stop(self) -> None:
        """Tell the engine that no more is wanted. Idempotent."""
        if not self.is_released:
            self._cancel(self.serial)

    async def take(self, timeout_s: float) -> list[Event]:
        """All that waits, at least one event, or [] when `timeout_s` has passed. Raises `Refused` once abandoned."""
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
    """All requests of one replica, from `open` until the engine has let go of them.

    `submit` hands a request to the engine's thread, and raises `Refused`; otherwise events follow, of which the last is
    Finished, Failed or Cancelled. `cancel` ignores unknown and ended ids.
    """

    def __init__(
        self, submit: Callable[[Request], None], cancel: Callable[[str], None], max_tokens: int = MAX_TOKENS
    ) -> None:
        self._submit = submit
        self._cancel = cancel
        self._max_tokens = max_tokens
        self._streams: dict[str, EventStream] = {}
        self._last = 0

    def __repr__(self) -> str:
        return f"<EventStreams {len(self._streams)}>"

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: Request) -> EventStream:
        """Hand it in under a serial of its own: a retry may meet the request it repeats. Raises `Refused`."""
        if len(self._streams) >= MAX_STREAMS:
            raise Refused(Overloaded("this replica", MAX_STREAMS, 1.0, "streams"))
        self._last += 1
        serial = f"{request.request_id}#{self._last}"
        self._submit(replace(request, request_id=serial))
        stream = self._streams[serial] = EventStream(serial, self._cancel, self._max_tokens)
        return stream

    def dispatch(self, events: list[Event]) -> None:
        """Pass on events of the engine's thread."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.push(event)
            if stream.is_released:
                del self._streams[event.request_id]

    def abandon_all(self, failure: Failure) -> None:
        """Abandon all streams. The engine is told, and reports what each has cost."""
        for stream in self._streams.values():
            stream.abandon(failure)

    def release_all(self, failure: Failure) -> None:
        """End all streams without the engine, which may never release them: it failed or hangs."""
        for stream in self._streams.values():
            stream.release()
            stream.abandon(failure)
        self._streams.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError where the table holds what is over."""
        for serial, stream in self._streams.items():
            assert stream.serial == serial, f"{stream} is filed as {serial}"
            assert not stream.is_released, f"{stream} should have left"
