"""Send one response over one connection: data frames, heartbeats, and the last frame, for success or failure.

The 200 is sent only after the engine has accepted the request. Until then a refusal keeps its own status code.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.types import Receive, Send

from kelvin.contracts.errors import Failure, Internal, LimitExceeded, Refused
from kelvin.contracts.problem import to_wire
from kelvin.contracts.serving.stream_frames import (
    CONTENT_TYPE,
    MAX_PAYLOAD,
    Counts,
    Frame,
    FrameKind,
    StreamEnd,
    encode_frame,
    failed_frame,
)
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.traffic_errors import Cancelled, DeadlineExceeded
from kelvin.process.race import wait_disconnected
from runtime.dependencies import READER
from runtime.drivers.event_stream import EventStream
from runtime.drivers.interface import Failed, Finished
from runtime.surface.answer_builder import AnswerBuilder, AnswerProgress

log = logging.getLogger(__name__)

COMMIT_DELAY_S: Final = 0.25  # how long the engine may take to refuse, before the 200 is sent
HEARTBEAT_INTERVAL_S: Final = 1.0
RELEASE_TIMEOUT_S: Final = 1.0  # for the engine to release a cancelled request: usually one step
WRITE_TIMEOUT_S: Final = READER.timeout_s  # how long one write may wait until the activator reads


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One request while it is answered: its event stream, and what the activator reported about it."""

    request_id: str
    stream: EventStream
    began_us: int
    tokenized_us: int
    delivered_tokens: int = 0  # acknowledged by the activator
    committed: bool = False  # the 200 was sent, so a record must exist
    ended: bool = False  # the last frame was sent
    disconnected: bool = False
    deleted: bool = False
    answered_elsewhere: bool = False  # another replica answered it
    recorded: bool = False  # the activator's record is durable
    unfiltered: bool = False  # some text of the prompt or response was not checked by its filters
    counts: Counts = field(default_factory=Counts)

    @property
    def unrecorded(self) -> bool:
        """Return whether a record must exist and no activator has confirmed it yet."""
        return self.committed and not self.recorded

    @property
    def connection_lost(self) -> bool:
        """Return whether the connection closed early without a DELETE: the activator died or uses another replica."""
        return self.disconnected and not self.ended and not self.deleted

    def cancel_by_activator(self) -> None:
        """Cancel the request because its activator sent a DELETE. That activator is alive and writes the record."""
        self.deleted = True
        self.stream.abandon(Cancelled())


async def watch_connection(receive: Receive, served_request: ServedRequest) -> None:
    """Cancel the request in the engine as soon as the activator disconnects. The body must have been read."""
    await wait_disconnected(receive)
    if not served_request.ended:
        served_request.disconnected = True
        served_request.stream.abandon(Cancelled())


@dataclass(frozen=True, slots=True)
class DeliveryCallbacks:
    """Calls from a delivery to the owner of its request."""

    on_commit: Callable[[], None]  # before the 200 is sent
    extra_headers: Callable[[], Sequence[tuple[bytes, bytes]]]  # of the 200
    before_last_frame: Callable[[], None]  # before the last frame is written


class Delivery:
    """The writer of one response. It raises `Refused` before the 200 was sent; later failures become a FAILED frame."""

    def __init__(
        self, served_request: ServedRequest, builder: AnswerBuilder, send: Send, callbacks: DeliveryCallbacks
    ) -> None:
        self._served_request = served_request
        self._builder = builder
        self._send = send
        self._callbacks = callbacks
        self._prefilled_us: int | None = None
        self._sent_at_s = time.monotonic()

    async def run(self) -> None:
        """Write from the first event to the last frame. Raises TimeoutError if the activator stopped reading."""
        try:
            await self._run()
        except Refused as refused:
            await self._fail(refused.failure)
        except TimeoutError:
            raise
        except Exception:
            log.exception("answer", extra={"request_id": self._served_request.request_id})
            await self._fail(Internal())

    async def _run(self) -> None:
        stream = self._served_request.stream
        events = await stream.next_events(COMMIT_DELAY_S)
        if events and isinstance(events[0], Failed):
            raise Refused(events[0].failure)
        while True:
            if events and self._prefilled_us is None:
                self._prefilled_us = now_us()
            progress = self._builder.add_events(events)
            if not isinstance(progress, AnswerProgress):  # a filter call is pending
                progress = await progress
            self._served_request.counts = progress.counts
            self._served_request.unfiltered = self._served_request.unfiltered or progress.unfiltered
            if len(progress.data) > MAX_PAYLOAD:
                raise Refused(LimitExceeded("answer", len(progress.data), MAX_PAYLOAD, "bytes"))
            frames = b""
            if progress.data:
                frames = encode_frame(Frame(FrameKind.DATA, progress.counts, progress.data))
            if progress.reason is not None:
                if not isinstance(events[-1], Finished):
                    stream.stop()  # a stop string was found; the engine does not know stop strings
                unfiltered = self._served_request.unfiltered
                end = msgspec.json.encode(
                    StreamEnd(finish_reason=progress.reason, spans=self._spans(), unfiltered=unfiltered)
                )
                await self._write(frames + encode_frame(Frame(FrameKind.END, progress.counts, end)), last=True)
                return
            if progress.failure is not None:
                await self._write(frames, last=False)
                raise Refused(progress.failure)
            if not frames and (not events or time.monotonic() - self._sent_at_s >= HEARTBEAT_INTERVAL_S):
                frames = encode_frame(Frame(FrameKind.HEARTBEAT, progress.counts))
            await self._write(frames, last=False)
            events = await stream.next_events(HEARTBEAT_INTERVAL_S)

    async def _fail(self, failure: Failure) -> None:
        served_request = self._served_request
        if served_request.stream.abandon_failure is None:
            served_request.counts = self._builder.counts
        else:
            # Cancelled here. The engine computes until it releases the request; the activator charges that too.
            served_request.counts = await served_request.stream.final_cost(RELEASE_TIMEOUT_S) or served_request.counts
        # The activator or the deadline cancelled it before anything was sent. Send the cost in a 200, so that the
        # request is counted.
        is_cancelled = (served_request.deleted and not served_request.answered_elsewhere) or isinstance(
            failure, DeadlineExceeded
        )
        is_charged = is_cancelled and not served_request.disconnected and served_request.counts.completion_tokens > 0
        if not (served_request.committed or is_charged):
            raise Refused(failure)
        await self._write(failed_frame(to_wire(failure), self._served_request.counts), last=True)

    async def _write(self, frames: bytes, *, last: bool) -> None:
        if not frames:
            return
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            if not self._served_request.committed:
                self._served_request.committed = True
                self._callbacks.on_commit()
                headers = [(b"content-type", CONTENT_TYPE.encode()), *self._callbacks.extra_headers()]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._served_request.ended = last and not self._served_request.disconnected
            if last:  # before the frame: the activator sends its next request once it has read it
                self._callbacks.before_last_frame()
            await self._send({"type": "http.response.body", "body": frames, "more_body": not last})
        self._sent_at_s = time.monotonic()

    def _spans(self) -> tuple[StageSpan, ...]:
        began = self._served_request.began_us
        spans = [StageSpan(Stage.TOKENIZED, self._served_request.tokenized_us - began)]
        if self._prefilled_us is not None:
            spans.append(StageSpan(Stage.PREFILLED, self._prefilled_us - began))
        return tuple(spans)


def now_us() -> int:
    """Return monotonic microseconds, the clock of `ServedRequest.began_us`."""
    return time.monotonic_ns() // 1000
