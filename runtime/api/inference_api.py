"""Serve inference requests: plain ASGI, for the activator alone, on the replica's own socket.

Control routes are passed on to `control_api.py`. `kelvin/contracts/errors.py` defines the status of each failure.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kelvin.contracts.accounting.usage import Receipt, Receipts
from kelvin.contracts.artifacts.kind_routes import ROUTES_BY_KIND, wrong_kind_failure
from kelvin.contracts.artifacts.runtime_control import BindRequest
from kelvin.contracts.errors import BodyTooLarge, Failure, Internal, InvalidRequest, MethodNotAllowed, NotFound, Refused
from kelvin.contracts.names import qualified_model_name
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.problem import OPENAI_CONTENT_TYPE, headers_of, openai_error
from kelvin.contracts.serving.degradation_steps import RECORDED_STEP_HEADER
from kelvin.contracts.serving.stream_frames import CREDIT_HEADER, ENCODED_TOKENS_HEADER, WANTS_HEADER, NoCredit
from kelvin.contracts.serving.token_limits import (
    CAP_TOKENS_HEADER,
    CONTEXT_TOKENS_HEADER,
    NO_TOKEN_LIMITS,
    OUTPUT_TOKENS_HEADER,
    TokenLimits,
    parse_token_count,
)
from kelvin.contracts.traffic_errors import Cancelled, DeadlineExceeded
from kelvin.contracts.wire import decode
from kelvin.process.race import run_until_disconnect
from runtime.api.delivery import Delivery, DeliveryCallbacks, ServedRequest, now_us, watch_connection
from runtime.api.orphan_records import OrphanRecords, UnconfirmedRequest
from runtime.drivers.event_stream import EventStreams
from runtime.drivers.interface import OWNER_TENANT
from runtime.lifecycle.credit_policy import Credits
from runtime.lifecycle.replica import RuntimeReplica
from runtime.surface.encoding_queue import INLINE_CHARACTERS
from runtime.surface.served_version import PreparedRequest, ServedVersion

log = logging.getLogger(__name__)

REQUEST_ID: Final = "x-kelvin-request-id"
DEADLINE: Final = "x-kelvin-deadline-ms"
KEY_ID: Final = "x-kelvin-key-id"
ACTIVATOR: Final = "x-kelvin-source"
IDEMPOTENCY: Final = "x-kelvin-once"
GUEST_TENANT: Final = "x-kelvin-guest"
RUNTIME: Final = b"x-kelvin-runtime"  # response header: the runtime id for the usage record
ANSWERED_ELSEWHERE: Final = "x-kelvin-elsewhere"  # on a DELETE: another replica has answered
MAX_TIMEOUT_S: Final = 3600.0  # also the timeout of a request without a deadline

_REQUESTS: Final = "/v1/requests/"
_RECEIPTS: Final = "/v1/receipts"
_KINDS: Final = {path: kind for kind, paths in ROUTES_BY_KIND.items() for path in paths}
_MAX_RECEIPTS_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The values that the activator sends as headers."""

    request_id: str
    key_id: str
    activator: str  # the spool of the activator that sent the request
    guest_tenant: str | None  # the caller's tenant, if it isn't the version's
    timeout_s: float
    deadline_s: float  # on the loop's clock
    ceiling: TokenLimits  # the caller's limits, within the version's
    began_us: int  # monotonic
    started_at_us: int  # wall clock
    idempotency_value: str  # the idempotency value of the usage record, or ""
    degraded: str  # the degradation step that was applied to the request, or ""
    # How many requests the activator wants to have here. None: its build does not know credits.
    wanted_streams: int | None


class CreditPermit:
    """One request's share of its activator's credit, from construction to `release`."""

    def __init__(self, credits: Credits, headers: RequestHeaders) -> None:
        """Raises `Refused(NoCredit)` if the replica has no stream for this activator."""
        self._credits = credits
        self._activator = headers.activator
        if headers.wanted_streams is None:
            credits.enter(headers.activator, time.monotonic())
        elif not credits.try_enter(headers.activator, headers.wanted_streams, time.monotonic()):
            raise Refused(NoCredit(credits.streams, self.credit))
        self._is_held = True

    @property
    def credit(self) -> int:
        """Return how many requests the activator may have here now."""
        return self._credits.credit_of(self._activator, time.monotonic())

    def release(self) -> None:
        """Return the permit. Idempotent: further calls do nothing."""
        if self._is_held:
            self._is_held = False
            self._credits.leave(self._activator)


class ServingApi:
    """The ASGI application of one replica process. It supports HTTP only."""

    def __init__(
        self, replica: RuntimeReplica, orphans: OrphanRecords, control: ASGIApp, *, in_pod: bool = False
    ) -> None:
        """With `in_pod`, activators run on other hosts and know this replica by its pod's name. A pod keeps its name
        when its process restarts, so each response names the runtime id.
        """
        self._replica = replica
        self._orphans = orphans
        self._control = control
        self._in_pod = in_pod
        self._pod_headers = ((RUNTIME, replica.runtime_id.encode()),) if in_pod else ()
        self._served_requests: dict[str, ServedRequest] = {}
        self._preparing: dict[str, asyncio.Timeout] = {}  # requests not yet in the engine, by id

    def __repr__(self) -> str:
        return f"<ServingApi exchanges={len(self._served_requests)}>"

    @property
    def served_requests(self) -> int:
        """Return how many requests are being answered."""
        return len(self._served_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path not in _KINDS and not path.startswith("/v1/"):
            await self._control(scope, receive, send)
            return
        request_id = _header(scope, REQUEST_ID)
        try:
            if path in _KINDS:
                _require_method(method, "POST")
                headers = _read_headers(scope)
                if self._in_pod or scope["scheme"] == "https":
                    self._orphans.record_remote_activator(headers.activator)
                await self._serve_request(headers, path, receive, send)
            elif path == _RECEIPTS:
                _require_method(method, "POST")
                for receipt in decode(await _read_body(receive, _MAX_RECEIPTS_BYTES), Receipts).receipts:
                    self._record_receipt(receipt)
                await _respond(send, 204)
            elif path.startswith(_REQUESTS):
                _require_method(method, "DELETE")
                self._delete(path[len(_REQUESTS) :], answered_elsewhere=_header(scope, ANSWERED_ELSEWHERE) is not None)
                await _respond(send, 204)
            else:
                raise Refused(NotFound("route", path[:80]))
        except Refused as refused:
            await _refuse(send, refused.failure, request_id, refused.encoded_tokens)
        except Exception:
            log.exception("request", extra={"request_id": request_id, "path": path})
            await _refuse(send, Internal(), request_id)

    async def _serve_request(self, headers: RequestHeaders, path: str, receive: Receive, send: Send) -> None:
        served_version, _ = self._replica.require_ready()
        if _KINDS[path] != served_version.kind:
            raise Refused(wrong_kind_failure(served_version.bind.model, served_version.kind))
        permit = CreditPermit(self._replica.credits, headers)
        try:
            prepared = await self._prepare(headers, path, served_version, receive)
            await self._deliver(headers, prepared, permit, receive, send)
        finally:
            permit.release()

    async def _prepare(
        self, headers: RequestHeaders, path: str, served_version: ServedVersion, receive: Receive
    ) -> PreparedRequest:
        """Read the body and prepare the request. Raises `Refused`: Cancelled after a DELETE, DeadlineExceeded."""
        limit = self._preparing[headers.request_id] = asyncio.timeout_at(headers.deadline_s)
        try:
            async with limit:
                raw = await _read_body(receive, served_version.limits.max_body_bytes)
                created_s = headers.started_at_us // 1_000_000
                tenant = headers.guest_tenant or OWNER_TENANT
                preparing = served_version.prepare(path, raw, headers.request_id, created_s, headers.ceiling, tenant)
                # Preparing a long body may wait, so cancel it if the activator disconnects. For a short body a watcher
                # costs more than it saves.
                prepared = await (
                    run_until_disconnect(receive, preparing) if len(raw) > INLINE_CHARACTERS else preparing
                )
            if asyncio.get_running_loop().time() >= _limit_at_s(limit):  # the timeout fires only where a wait occurs
                raise TimeoutError
            return prepared
        except TimeoutError:
            if _limit_at_s(limit) < headers.deadline_s:
                raise Refused(Cancelled()) from None
            raise Refused(DeadlineExceeded(headers.timeout_s, "reading, filtering or encoding the request")) from None
        finally:
            if self._preparing.get(headers.request_id) is limit:  # a retry may use the same id
                del self._preparing[headers.request_id]

    async def _deliver(
        self, headers: RequestHeaders, prepared: PreparedRequest, permit: CreditPermit, receive: Receive, send: Send
    ) -> None:
        # The replica may have failed or begun to drain while the body arrived.
        served_version, streams = self._replica.require_ready()
        with self._hold_request(headers, streams, prepared, served_version.bind) as served_request:
            callbacks = DeliveryCallbacks(
                on_commit=self._replica.meter.count_request,
                extra_headers=partial(self._response_headers, permit),
                before_last_frame=permit.release,
            )
            delivery = Delivery(served_request, prepared.builder, send, callbacks)
            watcher = asyncio.create_task(watch_connection(receive, served_request), name=f"watch-{headers.request_id}")
            expired = DeadlineExceeded(headers.timeout_s, "generating")
            timer = asyncio.get_running_loop().call_at(headers.deadline_s, served_request.stream.abandon, expired)
            try:
                await delivery.run()
            except TimeoutError:
                # The server closes a connection whose response is incomplete.
                log.warning("the activator stopped reading", extra={"request_id": headers.request_id})
            finally:
                timer.cancel()
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)

    def _response_headers(self, permit: CreditPermit) -> Sequence[tuple[bytes, bytes]]:
        return (*self._pod_headers, (CREDIT_HEADER.encode(), str(permit.credit).encode()))

    @contextmanager
    def _hold_request(
        self, headers: RequestHeaders, streams: EventStreams, prepared: PreparedRequest, bind: BindRequest
    ) -> Iterator[ServedRequest]:
        """Hold the request from the engine's acceptance to the last byte. On exit, release the engine and keep the
        account if the record is unconfirmed.
        """
        stream = streams.open(prepared.request)
        served_request = ServedRequest(
            headers.request_id, stream, headers.began_us, now_us(), unfiltered=prepared.unfiltered
        )
        self._served_requests[headers.request_id] = served_request
        try:
            yield served_request
        finally:
            stream.stop()
            log.debug("a request ended", extra={"completion_tokens": served_request.counts.completion_tokens})
            if self._served_requests.get(headers.request_id) is served_request:  # a retry may use the same id
                del self._served_requests[headers.request_id]
            if served_request.unrecorded:
                self._orphans.add(
                    self._unconfirmed_request(headers, served_request, bind, prepared.stream),
                    connection_lost=served_request.connection_lost,
                )
                if served_request.answered_elsewhere:
                    self._orphans.record_answered_elsewhere(headers.request_id)

    def _unconfirmed_request(
        self, headers: RequestHeaders, served_request: ServedRequest, bind: BindRequest, stream: bool
    ) -> UnconfirmedRequest:
        tenant = headers.guest_tenant or bind.tenant
        return UnconfirmedRequest(
            request_id=headers.request_id,
            activator=headers.activator,
            tenant=tenant,
            model=qualified_model_name(tenant, bind.tenant, bind.model),
            version=bind.version,
            key_id=headers.key_id,
            runtime_id=self._replica.runtime_id,
            started_at_us=headers.started_at_us,
            ended_at_us=time.time_ns() // 1000,
            stream=stream,
            counts=served_request.counts,
            delivered_tokens=min(served_request.delivered_tokens, served_request.counts.completion_tokens),
            idempotency_value=headers.idempotency_value,
            degraded=headers.degraded,
        )

    def _delete(self, request_id: str, *, answered_elsewhere: bool) -> None:
        if answered_elsewhere:
            self._orphans.record_answered_elsewhere(request_id)
        else:
            self._orphans.leave_to_activator(request_id)
        if (limit := self._preparing.get(request_id)) is not None and not limit.expired():
            # The request is not in the engine yet. Let its timeout expire now.
            limit.reschedule(asyncio.get_running_loop().time())
        if (served_request := self._served_requests.get(request_id)) is not None:
            served_request.answered_elsewhere = served_request.answered_elsewhere or answered_elsewhere
            served_request.cancel_by_activator()

    def _record_receipt(self, receipt: Receipt) -> None:
        """Apply a receipt. It may arrive before the last frame is sent, or after the request has ended."""
        self._orphans.apply_receipt(receipt)
        if (served_request := self._served_requests.get(receipt.request_id)) is not None:
            served_request.delivered_tokens = max(served_request.delivered_tokens, receipt.completion_tokens)
            served_request.recorded = served_request.recorded or receipt.recorded


def _limit_at_s(limit: asyncio.Timeout) -> float:
    due_s = limit.when()
    assert due_s is not None, "every request has a deadline"
    return due_s


def _read_headers(scope: Scope) -> RequestHeaders:
    request_id = _header(scope, REQUEST_ID)
    if not request_id:
        raise Refused(InvalidRequest(REQUEST_ID, "(missing)", "is required"))
    raw = _header(scope, DEADLINE)
    milliseconds = None if raw is None else parse_whole_number(raw)
    if raw is not None and milliseconds is None:
        raise Refused(InvalidRequest(DEADLINE, raw[:20], "must be a whole number of milliseconds"))
    timeout_s = MAX_TIMEOUT_S if milliseconds is None else min(milliseconds / 1000, MAX_TIMEOUT_S)
    return RequestHeaders(
        request_id=request_id,
        key_id=_header(scope, KEY_ID) or "",
        activator=_header(scope, ACTIVATOR) or "",
        guest_tenant=_header(scope, GUEST_TENANT),
        timeout_s=timeout_s,
        deadline_s=asyncio.get_running_loop().time() + timeout_s,
        ceiling=_read_ceiling(scope),
        began_us=now_us(),
        started_at_us=time.time_ns() // 1000,
        idempotency_value=_header(scope, IDEMPOTENCY) or "",
        degraded=_header(scope, RECORDED_STEP_HEADER) or "",
        wanted_streams=_read_wanted_streams(scope),
    )


def _read_ceiling(scope: Scope) -> TokenLimits:
    limits = tuple(
        _read_tokens(scope, name) for name in (CONTEXT_TOKENS_HEADER, OUTPUT_TOKENS_HEADER, CAP_TOKENS_HEADER)
    )
    return NO_TOKEN_LIMITS if limits == (None, None, None) else TokenLimits(*limits)


def _read_tokens(scope: Scope, name: str) -> int | None:
    raw = _header(scope, name)
    tokens = None if raw is None else parse_token_count(raw)
    if raw is not None and tokens is None:
        raise Refused(InvalidRequest(name, raw[:20], "must be a whole number of tokens"))
    return tokens


def _read_wanted_streams(scope: Scope) -> int | None:
    raw = _header(scope, WANTS_HEADER)
    return None if raw is None else max(1, parse_whole_number(raw, 9) or 1)


def _header(scope: Scope, name: str) -> str | None:
    key = name.encode()
    return next((value.decode("latin-1") for header, value in scope["headers"] if header == key), None)


def _require_method(method: str, required: str) -> None:
    if method != required:
        raise Refused(MethodNotAllowed(method, (required,)))


async def _read_body(receive: Receive, limit_bytes: int) -> bytes:
    """Return the body. Raises `Refused`: BodyTooLarge, or Cancelled if the connection closes first."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(Cancelled())
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise Refused(BodyTooLarge(limit_bytes))
        if not message.get("more_body", False):
            return bytes(body)


async def _refuse(send: Send, failure: Failure, request_id: str | None, encoded_tokens: int = 0) -> None:
    headers = headers_of(failure)
    if encoded_tokens:
        headers[ENCODED_TOKENS_HEADER] = str(encoded_tokens)
    if isinstance(failure, NoCredit):
        headers[CREDIT_HEADER] = str(failure.credit)
    await _respond(send, failure.status, openai_error(failure, request_id), headers)


async def _respond(send: Send, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
    lines = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    if body:
        lines.append((b"content-type", OPENAI_CONTENT_TYPE.encode()))
        lines.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
