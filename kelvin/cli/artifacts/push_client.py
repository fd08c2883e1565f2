"""Client of the push API: one method per call. Each call is retried while that may help, within a deadline."""

import random
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import click
import httpx

from kelvin.cli.base.api_client import CommandFailed, failure_of_response
from kelvin.contracts.artifacts.push_api import (
    CLIENT_PHRASE,
    AttestRequest,
    CommitRequest,
    Committed,
    Committing,
    Missing,
    MissingRequest,
    Plan,
    PlanRequest,
)
from kelvin.contracts.backoff import ExponentialBackoff
from kelvin.contracts.errors import Failure, Refused, RemoteFailure, Unavailable
from kelvin.contracts.token_bucket import TokenBucket
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import BadJson, decoder, encode

T = TypeVar("T")

PLAN_TIMEOUT_S: Final = 300.0  # headers of a large model over a slow network, and the gate
CALL_TIMEOUT_S: Final = 120.0
ACCEPTED: Final = 202
PIECE_BYTES: Final = 64 << 10
BURST_S: Final = 0.25  # a burst may hold this many seconds' worth of bytes


@contextmanager
def open_client() -> Iterator[httpx.Client]:
    """Yield the HTTP client of the running command. Raises `Refused` if the installation can't be found."""
    try:
        opened = click.get_current_context().obj.client()
    except CommandFailed as closed:
        raise Refused(RemoteFailure("unavailable", Unavailable.status, closed.message, None, True)) from closed
    with opened as client:
        # Refusals of the push API say whether a retry may help, so they are handled here, not in `raise_for_error`.
        client.event_hooks = {}
        yield client


def raise_for_failure(answer: httpx.Response) -> httpx.Response:
    """Return a successful response of `open_client`. Raises `Refused` with the failure of any other."""
    if not answer.is_success:
        raise Refused(failure_of_response(answer))
    return answer


def decode_response(answer: httpx.Response, kind: type[T]) -> T:
    """Decode a successful response. Raises `Refused` if another server or an incompatible release sent it."""
    try:
        return decoder(kind).decode(answer.content)
    except BadJson as error:
        url = answer.url.copy_with(query=None)
        message = f"{url} answered what this command can't read ({error}): is the URL Kelvin's?"
        raise Refused(RemoteFailure("unavailable", answer.status_code, message)) from error


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a call is retried after transient failures: `first_s` before the first response, then `give_up_s`."""

    give_up_s: float = 120.0
    first_s: float = 10.0
    base_s: float = 0.2
    cap_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] | None = None  # None: a sleep that ends early if the push is stopped
    jitter: Callable[[], float] = random.random

    def pause_s(self, failed: int, failure: Failure) -> float:
        """Return half of an exponential back-off step plus a random share of the other half; at least Retry-After."""
        step_s = ExponentialBackoff(self.base_s, self.cap_s).delay_s(failed + 1, 1 - self.jitter())
        return max(step_s, failure.retry_after_s or 0.0)


class BandwidthLimit:
    """Token bucket that limits how fast all threads together send bodies. Thread-safe. `sleep` may return early when
    sending is to stop.
    """

    def __init__(
        self,
        bytes_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_s = bytes_s
        self._bucket = TokenBucket()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<BandwidthLimit {self._bytes_s} bytes/s>"

    def pieces(self, body: bytes) -> Iterator[bytes]:
        """Yield `body` in pieces, each when the limit allows it."""
        for at in range(0, len(body), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            with self._lock:
                now_s = self._clock()
                self._bucket.take(len(piece), 1 / self._bytes_s, now_s)
                wait_s = self._bucket.wait_s(0, self._bytes_s * BURST_S, 1 / self._bytes_s, now_s)
            if wait_s > 0:
                self._sleep(wait_s)
            yield piece


class PushClient:
    """Methods raise `Refused` with the installation's failure, or with Unavailable. Thread-safe."""

    def __init__(
        self,
        client: httpx.Client,
        retry_policy: RetryPolicy | None = None,
        stopped: threading.Event | None = None,
        bandwidth_limit: BandwidthLimit | None = None,
    ) -> None:
        self._http = client
        self._retry_policy = retry_policy or RetryPolicy()
        self._stopped = stopped or threading.Event()  # once set, no call is retried
        self._pace = bandwidth_limit
        self._reached = False
        self._client = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"<PushClient reached={self._reached}>"

    def plan(self, request: PlanRequest) -> Plan:
        """Open a push: the installation judges the headers and lays out chunks."""
        return decode_response(self._call("POST", "/push/v1/plans", encode(request), PLAN_TIMEOUT_S), Plan)

    def missing(self, plan_id: str, digests: tuple[str, ...]) -> Missing:
        """Return which chunks have to be sent."""
        body = encode(MissingRequest(digests=digests))
        return decode_response(self._call("POST", f"/push/v1/plans/{plan_id}/missing", body), Missing)

    def put_chunk(self, plan_id: str, digest: str, data: bytes) -> None:
        """Send the bytes of one chunk."""
        headers = {"content-type": "application/octet-stream"}
        self._call("PUT", f"/push/v1/plans/{plan_id}/chunks/{digest}", data, headers=headers)

    def manifest_of(self, plan_id: str) -> bytes:
        """Return the manifest that the push would publish. Verify it before signing."""
        return self._call("GET", f"/push/v1/plans/{plan_id}/manifest", b"").content

    def attest(self, plan_id: str, request: AttestRequest) -> None:
        """Send a signed statement about the version."""
        self._call("POST", f"/push/v1/plans/{plan_id}/attestations", encode(request))

    def commit(self, plan_id: str, digests: tuple[str, ...]) -> Committed | Committing:
        """Publish the version. `Committing` means that the commit runs: call again."""
        body = encode(CommitRequest(digests=digests))
        answer = self._call("POST", f"/push/v1/plans/{plan_id}/commit?{CLIENT_PHRASE}={self._client}", body)
        kind: type[Committed] | type[Committing] = Committing if answer.status_code == ACCEPTED else Committed
        return decode_response(answer, kind)

    def _call(
        self,
        method: str,
        path: str,
        content: bytes,
        timeout_s: float = CALL_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        retry_policy = self._retry_policy
        sleep = retry_policy.sleep or self._stopped.wait
        began, failed = retry_policy.clock(), 0
        while True:
            failure, retryable = self._attempt(method, path, content, timeout_s, headers)
            if isinstance(failure, httpx.Response):
                self._reached = True
                return failure
            self._reached |= failure.code == Overloaded.code  # the installation answered, but is full
            failed += 1
            pause_s = retry_policy.pause_s(failed, failure)
            give_up_at = began + (retry_policy.give_up_s if self._reached else retry_policy.first_s)
            if not retryable or self._stopped.is_set() or retry_policy.clock() + pause_s > give_up_at:
                raise Refused(failure)
            sleep(pause_s)

    def _attempt(
        self, method: str, path: str, content: bytes, timeout_s: float, headers: Mapping[str, str] | None
    ) -> tuple[httpx.Response | Failure, bool]:
        """Return the response, or a failure and whether a retry may help."""
        named = {**(headers or {"content-type": "application/json"}), "content-length": str(len(content))}
        body = content if self._pace is None else self._pace.pieces(content)
        try:
            answer = self._http.request(method, path, content=body, headers=named, timeout=timeout_s)
        except httpx.TransportError as error:
            if (reason := _certificate_error(error)) is not None:
                return RemoteFailure("untrusted", 0, f"the installation's certificate is not trusted: {reason}"), False
            return Unavailable("the installation"), True
        if answer.is_success:
            return answer, False
        failure = failure_of_response(answer)
        return failure, failure.retryable


def _certificate_error(error: BaseException) -> str | None:
    """Return why the certificate was refused, or None. Such an error is not worth a retry."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause.verify_message
        cause = cause.__cause__ or cause.__context__
    return None
