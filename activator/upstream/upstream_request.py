"""Send one request to one replica and receive its frames. Leaving early cancels it. `attempts.py` decides on
retries.
"""

import asyncio
import errno
import logging
import resource
from contextlib import suppress
from typing import Final

import msgspec

from activator.upstream.http1_client import UpstreamResponse
from activator.upstream.replica_sessions import RECEIPT_TIMEOUT_S, ReplicaSession
from kelvin.contracts.accounting.usage import Receipt
from kelvin.contracts.errors import Failure, RemoteFailure, Unavailable
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.problem import SHOULD_RETRY
from kelvin.contracts.serving.degradation_steps import RECORDED_STEP_HEADER
from kelvin.contracts.serving.stream_frames import (
    CONTENT_TYPE,
    CREDIT_HEADER,
    ENCODED_TOKENS_HEADER,
    WANTS_HEADER,
    Counts,
    Frame,
    FrameDecoder,
    FrameKind,
    NoCredit,
)
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TokenLimits
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import BadJson, decoder
from kelvin.process.request_context import TRACEPARENT, current_request

log = logging.getLogger(__name__)

MAX_ERROR_BYTES: Final = 64 << 10  # of a response without frames
_FRAMES: Final = CONTENT_TYPE.encode()
_ENCODED: Final = ENCODED_TOKENS_HEADER.encode()
_CREDIT: Final = CREDIT_HEADER.encode()
_SHOULD_RETRY: Final = SHOULD_RETRY.encode()
_BUSY: Final = frozenset({429, 503})  # a proxy answers so for a replica that is full or not ready
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_NOBODY_LISTENS: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED})
RUNTIME: Final = b"x-kelvin-runtime"  # the name under which a replica records its requests, if it has one


class UpstreamLost(Exception):
    """The replica or its connection is gone, or something else answers in its place.

    `before_response`: it happened before the 200, so the replica did not count the request. `has_ended`: the replica's
    process has ended and never takes a request again.
    """

    def __init__(self, *, before_response: bool, has_ended: bool = False) -> None:
        super().__init__("before its first byte" if before_response else "in its answer")
        self.before_response = before_response
        self.has_ended = has_ended


class UpstreamRejected(Exception):
    """The replica refused the request, or withdrew its response before the client had any of it. Also raised if this
    process has no file descriptor left for a connection.
    """

    def __init__(self, failure: Failure, encoded_tokens: int = 0, credit: int | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.encoded_tokens = encoded_tokens
        self.credit = credit

    @property
    def is_full(self) -> bool:
        """Whether the replica was full, so that the request is queued again as if it had not been sent."""
        return self.failure.code == NoCredit.code


class UpstreamHeaders(msgspec.Struct, frozen=True, gc=False):
    """The headers of a request to a replica. The replica needs the key's id to record an orphaned request."""

    request_id: str
    key_id: str
    source: str  # our spool, which holds the record as long as this activator lives
    remaining_ms: int
    wants: int  # requests that this activator wants at the replica, including this one
    ceiling: TokenLimits = NO_TOKEN_LIMITS
    guest: str | None = None  # the caller's tenant, if it does not own the version
    once: str = ""  # for an orphan's record
    degraded: str | None = None  # for an orphan's record


class UpstreamRequest:
    """One request to a replica. Returns whole frames, and reads no faster than its caller does."""

    def __init__(
        self,
        session: ReplicaSession,
        path: str,
        body: bytes,
        upstream_headers: UpstreamHeaders,
    ) -> None:
        self._session = session
        self._path = path
        self._body = body
        self._request_id = upstream_headers.request_id
        self._headers = {
            "content-type": "application/json",
            "x-kelvin-request-id": upstream_headers.request_id,
            "x-kelvin-key-id": upstream_headers.key_id,
            "x-kelvin-source": upstream_headers.source,
            "x-kelvin-deadline-ms": str(upstream_headers.remaining_ms),
            WANTS_HEADER: str(upstream_headers.wants),
        }
        if upstream_headers.ceiling is not NO_TOKEN_LIMITS:
            self._headers.update(upstream_headers.ceiling.headers())
        if upstream_headers.guest is not None:
            self._headers["x-kelvin-guest"] = upstream_headers.guest
        if upstream_headers.once:
            self._headers["x-kelvin-once"] = upstream_headers.once
        if upstream_headers.degraded is not None:
            self._headers[RECORDED_STEP_HEADER] = upstream_headers.degraded
        if (request_cause := current_request()) is not None and request_cause.trace is not None:
            self._headers[TRACEPARENT] = str(request_cause.trace)
        self._response: UpstreamResponse | None = None
        self._decoder = FrameDecoder()
        self._has_ended = False  # there is nothing left to cancel
        self._is_abandoned = False
        self._delivered = 0
        self.cost: Counts | None = None  # cost of a cancelled response, as the replica reported it
        self.runtime_id: str | None = None  # the replica's own name, from its 200
        self.credit: int | None = None  # from the replica's 200
        self.is_closed = False
        self.cancel_task: asyncio.Task[None] | None = None  # cancels the request at an abandoned replica

    async def __aenter__(self) -> "UpstreamRequest":
        self._session.active_requests += 1
        try:
            self._response = await self._session.http.start_request(
                "POST", self._path, self._body, self._headers.items()
            )
            await self._response.wait_head()
            if self._response.status != 200 or self._response.fields.get(b"content-type") != _FRAMES:
                self._has_ended = True
                raise await self._read_rejection(self._response)
            self.credit = _credit(self._response)
            if RUNTIME in self._response.fields:
                self._name_runtime(self._response)
        except OSError as error:
            self._has_ended = True
            # A pod may listen at its address again. A runtime on this host never does.
            has_ended = self._response is None and self._session.is_on_this_host and error.errno in _NOBODY_LISTENS
            if self._response is not None:
                self._response.close()
                self._response = None
            await self._close()
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise UpstreamRejected(_out_of_descriptors()) from error
            raise UpstreamLost(before_response=True, has_ended=has_ended) from error
        except BaseException:
            await self._close()
            raise
        return self

    async def read_frames(self) -> list[Frame]:
        """Return the next frames when some arrive; [] after END or FAILED. Raises UpstreamLost if neither arrives."""
        assert self._response is not None
        while not self._has_ended:
            try:
                data = await self._response.read_part()
                frames = self._decoder.feed(data) if data else None
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError):
                    log.error(
                        "the response has invalid frames", extra={"request_id": self._request_id, "error": str(error)}
                    )
                else:
                    self._has_ended = True  # the connection is lost, so there is nothing to cancel
                raise UpstreamLost(before_response=False) from error
            if frames is None:  # a clean close without END is a loss
                self._has_ended = True
                raise UpstreamLost(before_response=False)
            if frames:
                self._has_ended = frames[-1].kind in (FrameKind.END, FrameKind.FAILED)
                return frames
        return []

    def acknowledge(self, completion_tokens: int) -> None:
        """Tell the replica how many tokens were delivered. Does not wait."""
        self._delivered = completion_tokens
        self._session.receipt_sender.queue_receipt(
            Receipt(request_id=self._request_id, completion_tokens=completion_tokens)
        )

    def report_recorded(self) -> None:
        """Tell the replica that the record is durable, so that it may drop the request. Does not wait."""
        receipt = Receipt(request_id=self._request_id, completion_tokens=self._delivered, recorded=True)
        self._session.receipt_sender.queue_receipt(receipt)

    def abandon(self) -> None:
        """Record that another replica answers. On leaving, this replica is told so, and records its work itself.
        Leaving does not wait for that; `cancel_task` is the task that does it.
        """
        self._is_abandoned = True

    async def _close(self, *_: object) -> None:
        """Keep the connection if the response is complete; otherwise cancel the request, then close."""
        self.is_closed = True
        response = self._response
        if self._is_abandoned and (not self._has_ended or (response is not None and response.status == 200)):
            self.cancel_task = self._session.background_tasks.start(self._cancel(response), RECEIPT_TIMEOUT_S)
        elif self._has_ended and (response is None or response.at_end):
            if response is not None:
                response.release()
            await self._leave_session()
        elif self._has_ended:
            self._session.background_tasks.start(self._read_end(response), RECEIPT_TIMEOUT_S)
        else:
            # In its own task, so that cancelling this request, once or twice, does not interrupt it.
            task = self._session.background_tasks.start(self._cancel(response), RECEIPT_TIMEOUT_S)
            await asyncio.shield(task)

    __aexit__ = _close

    async def _read_end(self, response: UpstreamResponse | None) -> None:
        """Read one more part, usually the end of the body. Otherwise the connection is not kept."""
        try:
            if response is not None:
                await response.read_part()
                response.release()
        except OSError:
            return
        finally:
            if response is not None:
                response.close()
            await self._leave_session()

    async def _cancel(self, response: UpstreamResponse | None) -> None:
        try:
            fields = (("x-kelvin-elsewhere", "1"),) if self._is_abandoned else ()
            deleted = await self._session.http.request("DELETE", f"/v1/requests/{self._request_id}", fields=fields)
            try:
                await deleted.read()
            finally:
                deleted.release()
            if response is not None and not self._is_abandoned:
                await self._read_cost(response)
        except OSError:
            return  # closing the connection cancels it, too
        finally:
            if response is not None:
                response.close()
            await self._leave_session()

    def _name_runtime(self, response: UpstreamResponse) -> None:
        if (name := response.fields.get(RUNTIME)) is not None:
            self.runtime_id = name.decode("latin-1")[:128]

    async def _read_cost(self, response: UpstreamResponse) -> None:
        """Read a cancelled response up to its last frame, which has its cost. Without frames it cost nothing."""
        await response.wait_head()
        if response.status != 200 or response.fields.get(b"content-type") != _FRAMES:
            return
        self._name_runtime(response)
        with suppress(ValueError):  # invalid frames
            while data := await response.read_part():
                for frame in self._decoder.feed(data):
                    self.cost = frame.counts
                    if frame.kind in (FrameKind.END, FrameKind.FAILED):
                        return

    async def _leave_session(self) -> None:
        self._session.active_requests -= 1
        if self._session.is_over:
            await self._session.close()

    async def _read_rejection(self, response: UpstreamResponse) -> UpstreamRejected | UpstreamLost:
        """Return what a response without frames means. A runtime's refusal names this request. Anything else comes from
        a sidecar or proxy, so no runtime took the request.
        """
        raw = b""
        while response.status != 200 and len(raw) <= MAX_ERROR_BYTES and (part := await response.read_part()):
            raw += part
        try:
            error = decoder(_ErrorBody).decode(raw).error
        except BadJson:
            error = None
        if error is not None and error.request_id == self._request_id:
            after_s = parse_whole_number(response.fields.get(b"retry-after", b""), 9)
            encoded_tokens = parse_whole_number(response.fields.get(_ENCODED, b""), 9) or 0
            retryable = response.status >= 500 and response.fields.get(_SHOULD_RETRY) != b"false"
            return UpstreamRejected(
                RemoteFailure(
                    error.code or "internal", response.status, error.message, error.param, retryable, after_s
                ),
                encoded_tokens,
                _credit(response),
            )
        log.warning(
            "the response is not from a runtime", extra={"request_id": self._request_id, "status": response.status}
        )
        if response.status in _BUSY:
            return UpstreamRejected(Unavailable("this replica"))
        return UpstreamLost(before_response=True)


def _out_of_descriptors() -> Overloaded:
    """Return the failure for an activator without free file descriptors, which can't reach any replica."""
    return Overloaded("this activator", resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1.0, "descriptors")


def _credit(response: UpstreamResponse) -> int | None:
    return parse_whole_number(response.fields.get(_CREDIT, b""), 9)


class _Error(msgspec.Struct):
    message: str
    code: str | None = None
    param: str | None = None
    request_id: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error
