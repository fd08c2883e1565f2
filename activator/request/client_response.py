"""The response to one completion: the head is held back briefly, then 200 and heartbeats until the first byte.

The usage record is durable before the last byte is handed to the socket. `attempts.py` relays a replica's bytes;
`idempotency.py` and `response_cache.py` replay kept answers.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from activator import dependencies
from activator.accounting.request_account import Account
from activator.accounting.usage_records import UsageRecords
from activator.http.exchange import ClientGone, Exchange, Headers, now_us
from activator.queue.policy.wait_estimate import UNKNOWN, WaitEstimate
from kelvin.contracts.errors import Failure, Internal, Refused
from kelvin.contracts.problem import OPENAI_CONTENT_TYPE, ErrorForm, headers_of, openai_error, sse_error
from kelvin.contracts.serving.degradation_steps import DEGRADED_HEADER
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.timeline import Stage
from kelvin.contracts.traffic_errors import Cancelled, DeadlineExceeded
from kelvin.contracts.wire import encode

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
# After these failures, a non-streamed response is charged for its computed tokens; after others it is not.
CHARGED_FAILURES: Final = frozenset({Cancelled.code, DeadlineExceeded.code})
SINGLE_WRITE_BYTES: Final = 64 << 10  # a non-streamed response up to this size is one write, after its record
_SSE: Final = b"text/event-stream; charset=utf-8"
_JSON: Final = OPENAI_CONTENT_TYPE.encode()
DONE: Final = b"data: [DONE]\n\n"


class ClientResponse:
    """The response to one request. Use from one task. Its heartbeat task ends before anything else is written."""

    def __init__(
        self,
        exchange: Exchange,
        account: Account,
        usage: UsageRecords,
        hold_s: float,
        stage: Callable[[], str],
        error_form: ErrorForm = openai_error,
        wait_estimate: Callable[[], WaitEstimate] = lambda: UNKNOWN,
    ) -> None:
        self._exchange = exchange
        self._account = account
        self._usage = usage
        self._hold_s = hold_s
        self._stage = stage
        self._error_form = error_form
        self._wait_estimate = wait_estimate
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._has_started = False  # the client has received some of the body
        self._buffered = b""  # the whole body if it doesn't stream, else its last event
        self._is_charged = False  # the whole response is charged, or may be: the write is not confirmed

    def defer_head(self) -> None:
        """Hold the head back for `hold_s`, during which a failure still gets its own status. Idempotent."""
        if self._account.stream and self._timer is None and self._heartbeat_task is None:
            self._timer = asyncio.get_running_loop().call_later(self._hold_s, self._start_heartbeats)

    async def relay_data(self, data: bytes, completion_tokens: int) -> None:
        """Send bytes of the replica. On return the client's socket has them, and the tokens count as delivered."""
        if not self._account.stream:
            self._buffered += data
            return
        if self._buffered:
            data = self._buffered + data
        self._buffered = DONE if data.endswith(DONE) else b""
        if self._buffered:
            data = data[: -len(DONE)]
        if data:
            if not self._has_started:
                self._has_started = True
                await self._ensure_head_sent()
            await self._exchange.write(data)
        self._account.delivered_tokens = completion_tokens

    def try_discard_data(self) -> bool:
        """Drop the replica's bytes, so that another can answer from the beginning. Return False if some were sent."""
        if self._has_started:
            return False
        self._buffered = b""
        self._account.counts, self._account.delivered_tokens = Counts(), 0
        return True

    async def complete(self) -> None:
        """Settle and end the response. Raises Refused if the record can't be made durable, ClientGone."""
        account, exchange = self._account, self._exchange
        if account.stream:
            await self._ensure_head_sent()
            await self._settle()
            await exchange.finish(self._timeline_comment() + self._buffered)
            return
        account.timeline.stamp(Stage.FIRST_TOKEN, now_us())
        head = [*self._head(_JSON), (b"content-length", str(len(self._buffered)).encode())]
        last_part = self._buffered
        if len(last_part) > SINGLE_WRITE_BYTES:
            await exchange.start(200, head)
            await exchange.write(last_part[:-1])
            last_part = last_part[-1:]
        else:
            await exchange.wait_delivered()  # nothing was sent yet, so this only checks that the client is connected
        account.delivered_tokens = account.counts.completion_tokens
        await self._settle()
        if not exchange.has_started:
            await exchange.start(200, head)
        await exchange.finish(last_part)

    async def settle_replay(self, outcome: str, status: int) -> None:
        """Settle a replayed answer without a charge, before its last piece is sent. Raises Refused."""
        self._exchange.shield_from_disconnect(dependencies.SPOOL.timeout_s)
        self._account.timeline.stamp(Stage.DONE, now_us())
        self._account.outcome = outcome
        await self._usage.settle(self._account, status=status)

    async def _settle(self) -> None:
        """Write the final record, which counts even if the client leaves now. The deadline no longer applies."""
        self._exchange.shield_from_disconnect(dependencies.SPOOL.timeout_s)
        self._account.timeline.stamp(Stage.DONE, now_us())
        self._is_charged = True
        try:
            await self._usage.settle(self._account)
        except Exception:  # nothing was recorded
            self._is_charged = False
            if not self._account.stream:  # its last byte was not sent
                self._account.delivered_tokens = 0
            raise

    async def fail(self, failure: Failure) -> None:
        """End the response with a failure: with its own status while the head is held, else as the last event."""
        await self.stop_heartbeats()
        self._exchange.connection.unwatch()
        if self._is_charged:  # a client that sees a failure would repeat the request and pay twice
            log.error(
                "the response is cut because its record may count", extra={"request_id": self._account.request_id}
            )
            self._exchange.connection.abort()
            return
        await self._settle_failed(failure, None if not self._exchange.has_started else 200)
        if self._exchange.connection.unaccepted_bytes():  # the client reads nothing, so a failure would not reach it
            self._exchange.connection.abort()
        elif not self._exchange.has_started:
            headers: Headers = [(key.encode(), value.encode()) for key, value in headers_of(failure).items()]
            headers.append((b"server-timing", self._account.timeline.server_timing().encode()))
            body = self._error_form(failure, self._account.request_id)
            await self._exchange.respond(failure.status, _JSON, body, headers)
        elif self._account.stream:
            await self._exchange.finish(self._timeline_comment() + sse_error(failure, self._account.request_id))
        else:  # a Content-Length was sent, so only a broken connection can signal the failure
            self._exchange.connection.abort()

    async def settle_disconnected(self, failure: Failure) -> None:
        """Settle the account of a request whose client has left."""
        await self.stop_heartbeats()
        await self._settle_failed(failure, None)

    async def _settle_failed(self, failure: Failure, status: int | None) -> None:
        account = self._account
        account.timeline.stamp(Stage.DONE, now_us())
        if not account.stream and failure.code in CHARGED_FAILURES:
            account.delivered_tokens = account.counts.completion_tokens
        try:
            if account.runtime_id is None:
                self._usage.settle_soon(account, failure, status)
                return
            async with asyncio.timeout(dependencies.SPOOL.timeout_s):
                await self._usage.settle(account, failure, status)
        # it has failed already: only log the missing record
        except (Refused, TimeoutError) as error:
            log.error("no usage record", extra={"request_id": account.request_id, "error": repr(error)})

    async def _ensure_head_sent(self) -> None:
        """Stop the heartbeats, and send the head if it is still held back."""
        self._account.timeline.stamp(Stage.FIRST_TOKEN, now_us())
        await self.stop_heartbeats()
        if not self._exchange.has_started:
            await self._exchange.start(200, self._head(_SSE))

    def _head(self, content_type: bytes) -> Headers:
        head: Headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"server-timing", self._account.timeline.server_timing().encode()),
        ]
        if self._account.version is not None:
            head.append((b"x-kelvin-version", self._account.version.encode()))
        if self._account.applied_step is not None:
            head.append((DEGRADED_HEADER.encode(), self._account.applied_step.header_value.encode()))
        return head

    def _timeline_comment(self) -> bytes:
        return b": timeline " + encode(self._account.snapshot_timeline()) + b"\n\n"

    def _start_heartbeats(self) -> None:
        self._timer = None
        self._heartbeat_task = asyncio.create_task(self._send_heartbeats())

    async def _send_heartbeats(self) -> None:
        """Send the head with 200, then a heartbeat every HEARTBEAT_S, until cancelled."""
        try:
            await self._exchange.start(200, self._head(_SSE))
            while True:
                elapsed_s = (now_us() - self._exchange.arrived_us) / 1e6
                estimate = self._wait_estimate().heartbeat_text()
                heartbeat = f": waiting stage={self._stage()} elapsed_s={elapsed_s:.1f}{estimate}\n\n"
                await self._exchange.write(heartbeat.encode())
                await asyncio.sleep(HEARTBEAT_S)
        except ClientGone:
            return  # the connection notifies the request's own task

    async def stop_heartbeats(self) -> None:
        """Stop the heartbeats. None is written after this returns, and none is cut short."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        heartbeat_task, self._heartbeat_task = self._heartbeat_task, None
        if heartbeat_task is not None:
            heartbeat_task.cancel()
            await asyncio.wait((heartbeat_task,))
            if not heartbeat_task.cancelled() and (error := heartbeat_task.exception()) is not None:
                log.error("a heartbeat failed", exc_info=error)


def log_internal_error(error: BaseException, request_id: str) -> Failure:
    """Log a defect of ours under the request's id, and return Internal for the client."""
    log.error("unforeseen failure", exc_info=error, extra={"request_id": request_id})
    return Internal()
