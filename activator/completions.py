"""One completion from key to last byte: a ladder that unwinds whoever leaves, and one record on every way out."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from activator.account import Account
from activator.answer import Answer, internal
from activator.authenticate import Authenticator
from activator.exchange import ClientGone, Exchange, now_us
from activator.keys import VersionKey
from activator.line import Replica
from activator.policy.traffic import ModelEntry, resolve, which_model
from activator.proxy import Declined, Lost, Told, Upstream, Upstreams
from activator.reporter import Reporter
from activator.routes import Complete
from activator.settings import RequestLimits
from activator.shares import Shares
from activator.table import Table
from activator.throttler import Throttler
from activator.usage import Usage
from activator.wake import Waker
from contracts.control import Principal, Scope
from contracts.deadline import Deadline
from contracts.errors import (
    BodyTooLarge,
    Cancelled,
    DeadlineExceeded,
    Failure,
    Internal,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Refused,
    ReplicaLost,
    Unavailable,
)
from contracts.frames import End, Frame, FrameKind
from contracts.kinds import INFER, PATHS, other_kind
from contracts.names import ModelReference
from contracts.problem import WireFailure, code_of, from_wire, open_inference_error, openai_error
from contracts.signature import check_schema
from contracts.timeline import Stage, Timeline
from contracts.usage import ACK_TOKENS
from contracts.wire import decode

ATTEMPTS: Final = 3


class _Routing(msgspec.Struct):
    """All that is decoded of a body; the rest passes unchanged."""

    model: str | None = None
    stream: bool | None = None


class _Parameters(msgspec.Struct):
    schema_hash: str | None = None


class _Prediction(msgspec.Struct):
    """The same of a prediction, whose model is in the path."""

    parameters: _Parameters | None = None


@dataclass(slots=True)
class _Call:
    """One completion under way."""

    exchange: Exchange
    path: str
    body: bytes
    reference: ModelReference
    entry: ModelEntry
    account: Account
    deadline: Deadline
    schemas: tuple[str, ...] = ()  # hashes that the caller expects
    stage: str = "admitting"
    key: VersionKey | None = None  # once it is known which version answers
    dispatched_us: int = 0
    upstream: Upstream | None = None  # at the replica that the record will name


class Completions:
    """Serves completions, chats, embeddings and predictions."""

    def __init__(
        self,
        authenticator: Authenticator,
        table: Table,
        throttler: Throttler,
        waker: Waker,
        reporter: Reporter,
        upstreams: Upstreams,
        usage: Usage,
        limits: RequestLimits,
    ) -> None:
        self._authenticator = authenticator
        self._table = table
        self._throttler = throttler
        self._waker = waker
        self._reporter = reporter
        self._upstreams = upstreams
        self._usage = usage
        self._limits = limits
        self._shares = Shares()
        self._bodies = 0  # bytes, of all requests inside

    async def serve(self, exchange: Exchange, asked: Complete) -> None:
        """Answer it. Raises Refused for what names no model of the caller's: such a request leaves no record."""
        principal = await self._authenticator.authenticate(exchange, Scope.INFER)
        own = self._table.limits(principal.tenant)
        body_bytes = self._limits.body_bytes if own.body_bytes is None else own.body_bytes
        with self._shares.enter(principal.tenant, own.requests), self._room(exchange.body_bound(body_bytes)):
            call = await self._open(exchange, asked, principal, body_bytes)
            try:
                await self._serve(call)
            finally:
                if call.upstream is not None and call.account.is_recorded:
                    call.upstream.recorded()

    async def _serve(self, call: _Call) -> None:
        exchange = call.exchange
        form = open_inference_error if call.path == INFER else openai_error

        def remaining_s() -> float | None:
            return None if call.key is None else self._throttler.remaining_s(call.key)

        answer = Answer(exchange, call.account, self._usage, self._limits.hold_s, lambda: call.stage, form, remaining_s)
        try:
            with exchange.leaving_ends():
                async with asyncio.timeout(call.deadline.remaining_s(time.monotonic())):
                    await self._run(call, answer)
        except Refused as refused:
            await answer.fail(refused.failure)
        except TimeoutError:
            waited_s = (now_us() - exchange.arrived_us) / 1e6
            await answer.fail(DeadlineExceeded(waited_s, call.stage))
        except ClientGone:
            await answer.leave(Cancelled())
        except asyncio.CancelledError:  # the drain's time is over; what is left to do is bounded, and must be done
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            await answer.fail(Unavailable("this activator"))
        except Exception as error:
            await answer.fail(internal(error, exchange.request_id))

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[None]:
        """Bytes of a body, taken before it is read and given back when its request has ended."""
        limit = self._limits.body_bytes_in_all
        if self._bodies + nbytes > limit:
            raise Refused(Overloaded("the room for request bodies", limit, 1.0))
        self._bodies += nbytes
        try:
            yield
        finally:
            self._bodies -= nbytes

    async def _open(self, exchange: Exchange, asked: Complete, principal: Principal, body_bytes: int) -> _Call:
        """For which of the caller's models, until when."""
        body = await exchange.read_body(body_bytes, self._limits.body_s)
        wanted, schemas = _wanted(exchange, asked, body)
        reference = which_model(asked.target.model, wanted.model)
        entry = self._table.model(principal.tenant, reference.model)
        is_own = asked.target.tenant in (None, principal.tenant) and principal.may_call(reference.model)
        if entry is None or not is_own:
            raise Refused(ModelNotFound(str(reference)))
        if wanted.stream and asked.path in PATHS["embed"]:
            raise Refused(InvalidRequest("stream", "true", "embeddings are not streamed"))
        account = Account(
            request_id=exchange.request_id,
            principal=principal,
            model=entry.model,
            stream=wanted.stream is True,
            started_at_us=exchange.arrived_at_us,
            timeline=Timeline(exchange.arrived_us),
            caller=exchange.caller,
        )
        return _Call(exchange, asked.path, body, reference, entry, account, self._deadline(exchange), schemas)

    def _deadline(self, exchange: Exchange) -> Deadline:
        """The earlier of the client's (`x-kelvin-deadline-ms`) and the installation's."""
        seconds = self._limits.deadline_s
        raw = exchange.header(b"x-kelvin-deadline-ms")
        if raw is not None:
            if not raw.isdigit() or len(raw) > 12:
                raise Refused(InvalidRequest("x-kelvin-deadline-ms", repr(raw[:20]), "must be whole milliseconds"))
            seconds = min(seconds, int(raw) / 1000)
        return Deadline.after(seconds, exchange.arrived_us / 1e6)

    async def _run(self, call: _Call, answer: Answer) -> None:
        row = resolve(call.reference, call.entry)
        call.account.version = row.version
        if call.path not in PATHS[row.kind]:
            raise Refused(other_kind(call.reference.model, row.kind))
        if row.signature is not None:
            for given in call.schemas:
                check_schema(given, row.signature)
        if len(call.body) > row.limits.max_body_bytes:
            raise Refused(BodyTooLarge(row.limits.max_body_bytes))
        if self._usage.failing:  # take on nothing that could not be recorded
            raise Refused(Unavailable("the usage spool"))
        key = call.key = VersionKey(row.tenant, row.model, row.version)
        call.account.timeline.stamp(Stage.ROUTED, now_us())
        # A version at zero is told by waking it: two stats would be added up.
        self._reporter.began(key, announce=not self._throttler.is_asleep(key))
        try:
            answer.hold()
            await self._get(key, call, answer)
            await answer.complete()
        finally:
            self._reporter.ended(key)

    async def _get(self, key: VersionKey, call: _Call, answer: Answer) -> None:
        """The whole answer from some replica: another one only where the first was lost before its first byte."""
        for attempt in range(1, ATTEMPTS + 1):
            waits_since_us = now_us()
            call.stage = "restoring" if self._throttler.is_asleep(key) else "queued"
            async with self._throttler.slot(key, len(call.body), call.deadline) as replica:
                self._dispatched(call, replica, waits_since_us)
                account = call.account
                remaining_ms = call.deadline.remaining_ms(time.monotonic())
                told = Told(account.request_id, account.principal.key_id, self._usage.source, remaining_ms)
                try:
                    async with self._upstreams.send(replica, call.path, call.body, told) as upstream:
                        call.upstream = upstream
                        await self._relay(call, answer, upstream)
                        return
                except Lost as lost:
                    self._throttler.report_lost(replica)
                    if not lost.untouched:
                        raise Refused(ReplicaLost()) from lost
                    account.runtime_id = call.upstream = None  # it served nothing of this
                    if attempt == ATTEMPTS:
                        raise Refused(ReplicaLost()) from lost
                except Declined as declined:
                    account.runtime_id = None
                    if code_of(declined.failure) != Unavailable.code or attempt == ATTEMPTS:
                        raise Refused(declined.failure) from declined
                    self._throttler.report_lost(replica)  # it drains, and the feed has yet to say so

    def _dispatched(self, call: _Call, replica: Replica, waits_since_us: int) -> None:
        """Stamp what the wait was made of; the restore's stages only where this request waited for that start."""
        now, account = now_us(), call.account
        account.queued_us += now - waits_since_us
        account.runtime_id = replica.row.runtime_id
        if replica.appeared_us > waits_since_us and replica.row.restore:
            account.cold = True
            longest_us = max(span.after_us for span in replica.row.restore)
            # Told again since it was asked for: it can't have been ready later than its row came.
            zero_us = min(replica.poked_us or replica.appeared_us, replica.appeared_us - longest_us)
            account.timeline.stamp(Stage.POKED, max(zero_us, account.timeline.began_us))
            late = [span for span in replica.row.restore if zero_us + span.after_us >= account.timeline.began_us]
            account.timeline.graft(late, zero_us)
        account.timeline.stamp(Stage.DISPATCHED, now)
        call.dispatched_us = now
        call.stage = "prefilling"

    async def _relay(self, call: _Call, answer: Answer, upstream: Upstream) -> None:
        """Frames to the client, no faster than it takes them. Raises Refused for a failure that the replica tells."""
        account, acknowledged = call.account, 0
        async for frames in upstream.batches():
            account.seen = frames[-1].counts
            data = [frame for frame in frames if frame.kind is FrameKind.DATA]
            if data:
                call.stage = "streaming"
                counts = data[-1].counts
                await answer.pass_on(_joined(data), counts.completion_tokens)
                if account.stream and counts.completion_tokens >= acknowledged + ACK_TOKENS:
                    acknowledged = counts.completion_tokens
                    upstream.acknowledge(acknowledged)
            last = frames[-1]
            if last.kind is FrameKind.FAILED:
                raise Refused(_failure(last))
            if last.kind is FrameKind.END:
                if account.delivered_tokens > acknowledged:  # if we die before the record is durable, it is charged
                    upstream.acknowledge(account.delivered_tokens)
                account.timeline.graft(_end(last).spans, call.dispatched_us)


def _wanted(exchange: Exchange, asked: Complete, body: bytes) -> tuple[_Routing, tuple[str, ...]]:
    """What a request says of its model, and the hashes of schemas that header and parameters name: each must hold."""
    if asked.path != INFER:
        return decode(body, _Routing), ()
    parameters = decode(body, _Prediction).parameters or _Parameters()
    header = exchange.header(b"x-kelvin-schema-hash")
    given = (None if header is None else header.decode("latin-1"), parameters.schema_hash)
    return _Routing(model=asked.named), tuple(each for each in given if each is not None)


def _joined(frames: Sequence[Frame]) -> bytes:
    return frames[0].payload if len(frames) == 1 else b"".join(frame.payload for frame in frames)


def _failure(frame: Frame) -> Failure:
    try:
        return from_wire(msgspec.json.decode(frame.payload, type=WireFailure))
    except msgspec.MsgspecError:
        return Internal()


def _end(frame: Frame) -> End:
    try:
        return msgspec.json.decode(frame.payload, type=End)
    except msgspec.MsgspecError:
        return End(finish_reason="stop")
