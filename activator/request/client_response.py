"""The answer to one completion: a head held back for a moment, then 200 and heartbeats until the first byte.

The account is settled, durably, before the last byte is handed to the socket. `attempts.py` relays the bytes of a
replica, `idempotency.py` and `response_cache.py` have those that are given again.
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

BEAT_S: Final = 1.0
# Whole answers that end so were cut for their caller: what was computed until then is charged. What fails is not.
CUT: Final = frozenset({Cancelled.code, DeadlineExceeded.code})
AT_ONCE: Final = 64 << 10  # a whole answer up to that leaves in one write, behind its record
_SSE: Final = b"text/event-stream; charset=utf-8"
_JSON: Final = OPENAI_CONTENT_TYPE.encode()
DONE: Final = b"data: [DONE]\n\n"


class ClientResponse:
    """Used by one task, but for the heartbeats, which end before anything else is written."""

    def __init__(
        self,
        exchange: Exchange,
        account: Account,
        usage: UsageRecords,
        hold_s: float,
        stage: Callable[[], str],
        form: ErrorForm = openai_error,
        wait_estimate: Callable[[], WaitEstimate] = lambda: UNKNOWN,
    ) -> None:
        self._exchange = exchange
        self._account = account
        self._usage = usage
        self._hold_s = hold_s
        self._stage = stage
        self._form = form
        self._outlook = wait_estimate
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._has_started = False  # the client has some of it
        self._buffered = b""  # the whole answer, where it doesn't stream; else its last event
        self._is_charged = False  # for all of it; or it may be, as the disk has not said

    def defer_head(self) -> None:
        """Begin to hold the head back: for `hold_s` a failure is answered with its own status. Idempotent."""
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

    def try_forget(self) -> bool:
        """Drop what a replica sent, so that another one can answer from the beginning. Return False if the client has
        some of it.
        """
        if self._has_started:
            return False
        self._buffered = b""
        self._account.seen, self._account.delivered_tokens = Counts(), 0
        return True

    async def complete(self) -> None:
        """The replica has said all. Raises Refused where the record can't be made durable, ClientGone."""
        account, exchange = self._account, self._exchange
        if account.stream:
            await self._ensure_head_sent()
            await self._settle()
            await exchange.finish(self._timeline() + self._buffered)
            return
        account.timeline.stamp(Stage.FIRST_TOKEN, now_us())
        head = [*self._head(_JSON), (b"content-length", str(len(self._buffered)).encode())]
        late = self._buffered
        if len(late) > AT_ONCE:
            await exchange.start(200, head)
            await exchange.write(late[:-1])
            late = late[-1:]
        else:
            await exchange.delivered()  # nothing was sent: only a client that has gone is no longer there
        account.delivered_tokens = account.seen.completion_tokens
        await self._settle()
        if not exchange.started:
            await exchange.start(200, head)
        await exchange.finish(late)

    async def settle_replay(self, outcome: str, status: int) -> None:
        """Another request's answer goes out here, to its last byte but one: settle, at no charge. Raises Refused."""
        self._exchange.shield_from_disconnect(dependencies.SPOOL.timeout_s)
        self._account.timeline.stamp(Stage.DONE, now_us())
        self._account.outcome = outcome
        await self._usage.settle(self._account, status=status)

    async def _settle(self) -> None:
        """From here on the record stands, whether or not the client stays for the rest, and its time is over."""
        self._exchange.shield_from_disconnect(dependencies.SPOOL.timeout_s)
        self._account.timeline.stamp(Stage.DONE, now_us())
        self._is_charged = True
        try:
            await self._usage.settle(self._account)
        except Exception:  # nothing was recorded
            self._is_charged = False
            if not self._account.stream:  # its last byte is not sent
                self._account.delivered_tokens = 0
            raise

    async def fail(self, failure: Failure) -> None:
        """End the answer with a failure: with its status while the head is held, else as the stream's last event."""
        await self.stop_heartbeats()
        self._exchange.connection.unwatch()
        if self._is_charged:  # who is told of a failure asks again, and pays again
            log.error("an answer is cut whose record may stand", extra={"request_id": self._account.request_id})
            self._exchange.connection.abort()
            return
        await self._settle_failed(failure, None if not self._exchange.started else 200)
        if self._exchange.connection.unaccepted():  # it reads nothing: no last word would reach it
            self._exchange.connection.abort()
        elif not self._exchange.started:
            headers: Headers = [(key.encode(), value.encode()) for key, value in headers_of(failure).items()]
            headers.append((b"server-timing", self._account.timeline.server_timing().encode()))
            body = self._form(failure, self._account.request_id)
            await self._exchange.respond(failure.status, _JSON, body, headers)
        elif self._account.stream:
            await self._exchange.finish(self._timeline() + sse_error(failure, self._account.request_id))
        else:  # a length was promised: only a broken connection tells the truth
            self._exchange.connection.abort()

    async def settle_disconnected(self, failure: Failure) -> None:
        """Settle the account of a request whose client has left."""
        await self.stop_heartbeats()
        await self._settle_failed(failure, None)

    async def _settle_failed(self, failure: Failure, status: int | None) -> None:
        account = self._account
        account.timeline.stamp(Stage.DONE, now_us())
        if not account.stream and failure.code in CUT:
            account.delivered_tokens = account.seen.completion_tokens
        try:
            if account.runtime_id is None:
                self._usage.settle_soon(account, failure, status)
                return
            async with asyncio.timeout(dependencies.SPOOL.timeout_s):
                await self._usage.settle(account, failure, status)
        except (Refused, TimeoutError) as error:  # it failed already; that it goes unrecorded is all there is to say
            log.error("no usage record", extra={"request_id": account.request_id, "error": repr(error)})

    async def _ensure_head_sent(self) -> None:
        """The first bytes of the replica: no more heartbeats, and the head if it is still held."""
        self._account.timeline.stamp(Stage.FIRST_TOKEN, now_us())
        await self.stop_heartbeats()
        if not self._exchange.started:
            await self._exchange.start(200, self._head(_SSE))

    def _head(self, content_type: bytes) -> Headers:
        head: Headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"server-timing", self._account.timeline.server_timing().encode()),
        ]
        if self._account.version is not None:
            head.append((b"x-kelvin-version", self._account.version.encode()))
        if self._account.degraded is not None:
            head.append((DEGRADED_HEADER.encode(), self._account.degraded.told.encode()))
        return head

    def _timeline(self) -> bytes:
        return b": timeline " + encode(self._account.snapshot_timeline()) + b"\n\n"

    def _start_heartbeats(self) -> None:
        self._timer = None
        self._heartbeat_task = asyncio.create_task(self._send_heartbeats())

    async def _send_heartbeats(self) -> None:
        """Commit 200, then say every second that we live, until told to be still."""
        try:
            await self._exchange.start(200, self._head(_SSE))
            while True:
                elapsed_s = (now_us() - self._exchange.arrived_us) / 1e6
                beat = f": waiting stage={self._stage()} elapsed_s={elapsed_s:.1f}{self._outlook().words()}\n\n"
                await self._exchange.write(beat.encode())
                await asyncio.sleep(BEAT_S)
        except ClientGone:
            return  # the request's own task is told by the connection

    async def stop_heartbeats(self) -> None:
        """No heartbeat is written once this returns; a write is never cut in two."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        heart, self._heartbeat_task = self._heartbeat_task, None
        if heart is not None:
            heart.cancel()
            await asyncio.wait((heart,))
            if not heart.cancelled() and (error := heart.exception()) is not None:
                log.error("the heartbeat failed", exc_info=error)


def log_internal_error(error: BaseException, request_id: str) -> Failure:
    """A defect of ours: logged under the request's id, told as no more than that."""
    log.error("unforeseen failure", exc_info=error, extra={"request_id": request_id})
    return Internal()
