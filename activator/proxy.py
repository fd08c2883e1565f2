"""Send one request to one replica and receive its frames. Leaving early cancels it there. `attempts.py` decides on
retries.
"""

import asyncio
import errno
import logging
import resource
from contextlib import suppress
from typing import Final

import msgspec

from activator import dependencies
from activator.errands import Errands
from activator.line import Replica
from activator.sessions import Session
from activator.upstream_http import Answer
from contracts.ceiling import NO_CEILING, Ceiling
from contracts.errors import Failure, RemoteFailure, Unavailable
from contracts.frames import CONTENT_TYPE, CREDIT, ENCODED, WANTS, Counts, Frame, FrameDecoder, FrameKind, NoCredit
from contracts.ladder import RECORDED
from contracts.numbers import whole_number
from contracts.problem import SHOULD_RETRY
from contracts.roles import Role
from contracts.traffic_errors import Overloaded
from contracts.usage import Receipt
from contracts.wire import BadJson, decoder
from service.cause import TRACEPARENT, cause
from service.way import Ways

log = logging.getLogger(__name__)

ERRAND_S: Final = dependencies.RECEIPTS.timeout_s
MAX_ERROR_BYTES: Final = 64 << 10  # of a response that is no stream of frames
_FRAMES: Final = CONTENT_TYPE.encode()
_ENCODED: Final = ENCODED.encode()
_CREDIT: Final = CREDIT.encode()
_SHOULD_RETRY: Final = SHOULD_RETRY.encode()
_BUSY: Final = frozenset({429, 503})  # a proxy's answer for a replica that is full or not ready
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_NOBODY_LISTENS: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED})
RUNTIME: Final = b"x-kelvin-runtime"  # by which a replica counts its requests, where it has a name of its own


class Lost(Exception):
    """The replica or its connection is gone, or something else answers in its place.

    `untouched`: that was before its 200, so it did not count the request. `has_ended`: its process has ended, and will
    never take a request again.
    """

    def __init__(self, *, untouched: bool, has_ended: bool = False) -> None:
        super().__init__("before its first byte" if untouched else "in its answer")
        self.untouched = untouched
        self.has_ended = has_ended


class Declined(Exception):
    """The replica refused the request, or withdrew its answer before the client had any of it. Or this process could
    not connect.
    """

    def __init__(self, failure: Failure, encoded_tokens: int = 0, credit: int | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.encoded_tokens = encoded_tokens
        self.credit = credit

    @property
    def is_full(self) -> bool:
        """Whether the replica was full, and the request waits again as if it had not been sent."""
        return self.failure.code == NoCredit.code


class Told(msgspec.Struct, frozen=True, gc=False):
    """What the replica is told beside the body; the key's id is for the record of an orphan."""

    request_id: str
    key_id: str
    source: str  # our spool: while we live, we owe the record
    remaining_ms: int
    wants: int  # requests that this activator would have at the replica, this one included
    ceiling: Ceiling = NO_CEILING
    guest: str | None = None  # the caller's tenant, where the version is another's
    once: str = ""  # for the record of an orphan, too
    degraded: str | None = None  # likewise


class Upstreams:
    """Kept connections to replicas. `retain` forgets those that are no more."""

    def __init__(self, ways: Ways, errands: Errands) -> None:
        self._ways = ways
        self._errands = errands
        self._sessions: dict[str, Session] = {}

    def __repr__(self) -> str:
        return f"<Upstreams replicas={len(self._sessions)}>"

    def send(self, replica: Replica, path: str, body: bytes, told: "Told") -> "Upstream":
        """`async with` it, then take `some`. Entering raises Declined, Lost."""
        address = replica.row.address
        session = self._sessions.get(address)
        if session is None:
            session = self._sessions[address] = Session(self._ways.to(address, Role.RUNTIME), self._errands)
        return Upstream(session, self._errands, path, body, told)

    def retain(self, addresses: set[str]) -> None:
        """Close what is idle and not among these; what is busy closes when it has ended."""
        for address in self._sessions.keys() - addresses:
            self._errands.start(self._sessions.pop(address).retire(), ERRAND_S)

    async def close(self) -> None:
        """End all connections."""
        for session in self._sessions.values():
            session.http.close()
        self._sessions.clear()


class Upstream:
    """One request. Gives whole frames, as many as have come; reads no faster than it is asked."""

    def __init__(self, session: Session, errands: Errands, path: str, body: bytes, told: "Told") -> None:
        self._session = session
        self._errands = errands
        self._path = path
        self._body = body
        self._request_id = told.request_id
        self._headers = {
            "content-type": "application/json",
            "x-kelvin-request-id": told.request_id,
            "x-kelvin-key-id": told.key_id,
            "x-kelvin-source": told.source,
            "x-kelvin-deadline-ms": str(told.remaining_ms),
            WANTS: str(told.wants),
        }
        if told.ceiling is not NO_CEILING:
            self._headers.update(told.ceiling.headers())
        if told.guest is not None:
            self._headers["x-kelvin-guest"] = told.guest
        if told.once:
            self._headers["x-kelvin-once"] = told.once
        if told.degraded is not None:
            self._headers[RECORDED] = told.degraded
        if (asked := cause()) is not None and asked.trace is not None:
            self._headers[TRACEPARENT] = str(asked.trace)
        self._answer: Answer | None = None
        self._decoder = FrameDecoder()
        self._over = False  # nothing is left to cancel
        self._is_disowned = False
        self._delivered = 0
        self.cost: Counts | None = None  # of a cancelled answer, as the replica reported it
        self.runtime_id: str | None = None  # as the replica calls itself, with its 200
        self.credit: int | None = None  # as the replica tells it with its 200
        self.is_left = False
        self.telling: asyncio.Task[None] | None = None  # a replica that was disowned

    async def __aenter__(self) -> "Upstream":
        self._session.busy += 1
        try:
            self._answer = await self._session.http.ask("POST", self._path, self._body, self._headers.items())
            await self._answer.head()
            if self._answer.status != 200 or self._answer.fields.get(b"content-type") != _FRAMES:
                self._over = True
                raise await self._rejection(self._answer)
            self.credit = _credit(self._answer)
            if RUNTIME in self._answer.fields:
                self._name_runtime(self._answer)
        except OSError as error:
            self._over = True
            # A pod may listen at its address again. A runtime on this host never does.
            has_ended = self._answer is None and self._session.is_on_this_host and error.errno in _NOBODY_LISTENS
            if self._answer is not None:
                self._answer.close()
                self._answer = None
            await self._leave()
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise Declined(_out_of_descriptors()) from error
            raise Lost(untouched=True, has_ended=has_ended) from error
        except BaseException:
            await self._leave()
            raise
        return self

    async def some(self) -> list[Frame]:
        """Return the next frames, in order, as soon as there are any; [] after END or FAILED. Raises Lost if neither
        comes.
        """
        assert self._answer is not None
        while not self._over:
            try:
                data = await self._answer.some()
                frames = self._decoder.feed(data) if data else None
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError):
                    log.error("not our frames", extra={"request_id": self._request_id, "error": str(error)})
                else:
                    self._over = True  # there is nobody to cancel it at
                raise Lost(untouched=False) from error
            if frames is None:  # a clean end without END is no end
                self._over = True
                raise Lost(untouched=False)
            if frames:
                self._over = frames[-1].kind in (FrameKind.END, FrameKind.FAILED)
                return frames
        return []

    def acknowledge(self, completion_tokens: int) -> None:
        """Tell the replica how many tokens were delivered."""
        self._delivered = completion_tokens
        self._session.desk.tell(Receipt(request_id=self._request_id, completion_tokens=completion_tokens))

    def recorded(self) -> None:
        """Tell the replica that the request's record is durable: it may forget it."""
        receipt = Receipt(request_id=self._request_id, completion_tokens=self._delivered, recorded=True)
        self._session.desk.tell(receipt)

    def disown(self) -> None:
        """Record that another replica answers. Leaving then tells this one, which records its work itself. Leaving does
        not wait for that; `telling` is the task that does.
        """
        self._is_disowned = True

    async def _leave(self, *_: object) -> None:
        """Keep the connection if the answer is complete; otherwise cancel the request, then close."""
        self.is_left = True
        answer = self._answer
        if self._is_disowned and (not self._over or (answer is not None and answer.status == 200)):
            self.telling = self._errands.start(self._cancel(answer), ERRAND_S)
        elif self._over and (answer is None or answer.at_end):
            if answer is not None:
                answer.release()
            await self._gone()
        elif self._over:
            self._errands.start(self._rest(answer), ERRAND_S)
        else:
            # On its own: the cancellation of this request, or a second one, must not cut it short.
            task = self._errands.start(self._cancel(answer), ERRAND_S)
            await asyncio.shield(task)

    __aexit__ = _leave

    async def _rest(self, answer: Answer | None) -> None:
        """Read one more part. Mostly that is the end of the body; otherwise the connection is not kept."""
        try:
            if answer is not None:
                await answer.some()
                answer.release()
        except OSError:
            return
        finally:
            if answer is not None:
                answer.close()
            await self._gone()

    async def _cancel(self, answer: Answer | None) -> None:
        try:
            fields = (("x-kelvin-elsewhere", "1"),) if self._is_disowned else ()
            deleted = await self._session.http.send("DELETE", f"/v1/requests/{self._request_id}", fields=fields)
            try:
                await deleted.read()
            finally:
                deleted.release()
            if answer is not None and not self._is_disowned:
                await self._read_cost(answer)
        except OSError:
            return  # closing tells it, too
        finally:
            if answer is not None:
                answer.close()
            await self._gone()

    def _name_runtime(self, answer: Answer) -> None:
        if (name := answer.fields.get(RUNTIME)) is not None:
            self.runtime_id = name.decode("latin-1")[:128]

    async def _read_cost(self, answer: Answer) -> None:
        """Read a cancelled answer up to its last frame, which has its cost. Without frames it cost nothing."""
        await answer.head()
        if answer.status != 200 or answer.fields.get(b"content-type") != _FRAMES:
            return
        self._name_runtime(answer)
        with suppress(ValueError):  # not our frames
            while data := await answer.some():
                for frame in self._decoder.feed(data):
                    self.cost = frame.counts
                    if frame.kind in (FrameKind.END, FrameKind.FAILED):
                        return

    async def _gone(self) -> None:
        self._session.busy -= 1
        if self._session.is_over:
            await self._session.close()

    async def _rejection(self, answer: Answer) -> Declined | Lost:
        """Return what a response without frames means.

        A refusal of the runtime names this request. Anything else comes from a sidecar or proxy in its place, so no
        runtime took the request.
        """
        raw = b""
        while answer.status != 200 and len(raw) <= MAX_ERROR_BYTES and (part := await answer.some()):
            raw += part
        try:
            error = decoder(_ErrorBody).decode(raw).error
        except BadJson:
            error = None
        if error is not None and error.request_id == self._request_id:
            after_s = whole_number(answer.fields.get(b"retry-after", b""), 9)
            encoded_tokens = whole_number(answer.fields.get(_ENCODED, b""), 9) or 0
            retryable = answer.status >= 500 and answer.fields.get(_SHOULD_RETRY) != b"false"
            return Declined(
                RemoteFailure(error.code or "internal", answer.status, error.message, error.param, retryable, after_s),
                encoded_tokens,
                _credit(answer),
            )
        log.warning("what answered is no runtime", extra={"request_id": self._request_id, "status": answer.status})
        if answer.status in _BUSY:
            return Declined(Unavailable("this replica"))
        return Lost(untouched=True)


def _out_of_descriptors() -> Overloaded:
    """Return the failure of an activator without free file descriptors. No replica can be reached then."""
    return Overloaded("this activator", resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1.0, "descriptors")


def _credit(answer: Answer) -> int | None:
    return whole_number(answer.fields.get(_CREDIT, b""), 9)


class _Error(msgspec.Struct):
    message: str
    code: str | None = None
    param: str | None = None
    request_id: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error
