"""Read bytes of an S3 object with ranged GETs. Each response's headers are checked against the requested range.

A GET blocks a thread of the store's pool, and a `CancelToken` cancels it from another thread. A cancelled read returns
at once in both cases. While the body arrives, the read is interrupted and awaited, because it writes to the caller's
memory. While a GET waits for the response head, it can't be interrupted. It will not touch the memory any more, so its
thread is abandoned until the endpoint's silence ends.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kelvin.blobstore.blob_store import BlobShort, BlobUnavailable
from kelvin.blobstore.s3_client import status_of, translate_errors
from kelvin.blobstore.s3_location import S3Location

# Bytes between two checks of the cancel token. The client buffers each piece in memory of its own. Larger pieces are no
# faster; pieces of a quarter of this size cost a fifth more CPU time.
_PIECE_BYTES: Final = 1 << 20
_WORTH_BYTES: Final = 256 << 10  # a cut response with this many bytes is worth resuming
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
T = TypeVar("T")
MAX_ABANDONED: Final = 8  # abandoned reads at once; they occupy threads of the store


class ReadCancelled(Exception):
    """The call was cancelled by its token. Never leaves the store: the code that cancels has its own error to raise."""


class CancelToken:
    """Cancels reads from another thread. Reads of a body are interrupted; reads that have not begun do not begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: set[Any] = set()
        self._set = False

    def __repr__(self) -> str:
        return f"<CancelToken set={self._set} bodies={len(self._bodies)}>"

    def set(self) -> None:
        """Cancel all reads with this token. Idempotent."""
        with self._lock:
            self._set = True
            for body in self._bodies:
                _interrupt(body)

    @property
    def is_quiet(self) -> bool:
        """Return whether the token is set and no body is being read. This is final."""
        with self._lock:
            return self._set and not self._bodies

    def check(self) -> None:
        """Raise `ReadCancelled` if the token is set."""
        if self._set:
            raise ReadCancelled

    @contextmanager
    def read_body(self, body: Any) -> Iterator[None]:
        """Register `body` while the block reads it. Errors after cancellation become `ReadCancelled`."""
        with self._lock:
            self.check()
            self._bodies.add(body)
        try:
            yield
        except Exception as error:
            if self._set:
                raise ReadCancelled from error
            raise
        finally:
            with self._lock:
                self._bodies.discard(body)


def _interrupt(body: Any) -> None:
    """Shut down the reading side of the body's connection, so that a read in another thread ends now."""
    with suppress(Exception):  # it has ended already, or this library version can't: then the read timeout ends it
        body._raw_stream.shutdown()


@dataclass(frozen=True, slots=True)
class ObjectStart:
    """The first bytes from an offset, and the object's size and ETag from the response."""

    data: bytearray
    size: int
    etag: str


class _Cut(BlobUnavailable):
    """A body ended after `done` bytes, too early."""

    def __init__(self, reason: str, done: int) -> None:
        super().__init__(reason)
        self.done = done


def get_range(
    client: Any,
    location: S3Location,
    key: str,
    offset: int,
    into: memoryview,
    etag: str | None,
    cancel_token: CancelToken,
) -> str:
    """Fill `into` from `offset`. With `etag`, only from the object with that ETag. Return the object's ETag.

    A response that is cut is resumed from the same object, as long as each response brings _WORTH_BYTES or more. Raises
    `BlobNotFound`; `BlobShort` if the object ends too early; `BlobUnavailable` for all else, also for a wrong range.
    """
    done = 0
    while True:
        with _opened(client, location, key, offset + done, into.nbytes - done, etag, cancel_token) as (body, head):
            if head.size < offset + into.nbytes:
                raise BlobShort(key, offset, into.nbytes)
            try:
                _fill(body, into[done:], cancel_token)
            except _Cut as cut:
                cancel_token.check()
                if cut.done < _WORTH_BYTES or not head.etag:
                    raise
                done, etag = done + cut.done, head.etag
            else:
                return head.etag


def get_start(
    client: Any, location: S3Location, key: str, offset: int, limit: int, cancel_token: CancelToken
) -> ObjectStart:
    """Return at most `limit` bytes from `offset`. Raises as `get_range`, and `BlobShort` if no byte is there."""
    with _opened(client, location, key, offset, limit, None, cancel_token) as (body, head):
        data = bytearray(head.length)
        _fill(body, memoryview(data), cancel_token)
    return ObjectStart(data, head.size, head.etag)


@dataclass(frozen=True, slots=True)
class _Head:
    length: int
    size: int
    etag: str


@contextmanager
def _opened(
    client: Any, location: S3Location, key: str, offset: int, length: int, etag: str | None, cancel_token: CancelToken
) -> Iterator[tuple[Any, _Head]]:
    """Open the range, as far as the object goes, and yield its body and head."""
    cancel_token.check()
    where = f"bytes={offset}-{offset + length - 1}"
    condition = {} if etag is None else {"IfMatch": etag}
    try:
        with translate_errors(key):
            answer = client.get_object(Bucket=location.bucket, Key=location.prefix + key, Range=where, **condition)
    except BlobUnavailable as unavailable:
        if status_of(unavailable) == 416:
            raise BlobShort(key, offset, length) from None
        raise
    body = answer["Body"]
    try:
        head = _checked(answer, offset, length)
        if etag is not None and head.etag != etag:  # an endpoint without If-Match, or a cache in front of it
            raise BlobUnavailable("S3 returned another object than the requested one")
        with cancel_token.read_body(body):
            yield body, head
    finally:
        body.close()


def _checked(answer: Any, offset: int, length: int) -> _Head:
    """Check that the response is the requested range, cut only by the object's end, and that its headers agree."""
    content_range = str(answer.get("ContentRange", ""))
    parsed = _CONTENT_RANGE.fullmatch(content_range)
    first, last, size = map(int, parsed.groups()) if parsed else (-1, -1, -1)
    end = min(offset + length, size)
    if (first, last) != (offset, end - 1):
        raise BlobUnavailable(f"S3 returned another range than bytes {offset}+{length}: '{content_range[:80]}'")
    if answer.get("ContentLength") != end - offset:
        raise BlobUnavailable(f"S3 answered {answer.get('ContentLength')} bytes of {end - offset}")
    return _Head(end - offset, size, str(answer.get("ETag", "")))


def _fill(body: Any, into: memoryview, cancel_token: CancelToken) -> None:
    done = 0
    while done < into.nbytes:
        cancel_token.check()
        try:
            count = body.readinto(into[done : done + _PIECE_BYTES])
        except Exception as error:  # botocore does not translate some of the transport's errors
            raise _Cut(f"an answer of S3 broke off: {type(error).__name__}", done) from error
        if count == 0:
            raise _Cut(f"an answer of S3 ended after {done} of {into.nbytes} bytes", done)
        done += count


class RangeCalls:
    """Runs blocking calls that read with a `CancelToken`, or into memory of their own."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._abandoned: set[Future[object]] = set()

    def __repr__(self) -> str:
        return f"<RangeCalls abandoned={len(self._abandoned)}>"

    async def run(self, calls: Sequence[Callable[[], T]], cancel_token: CancelToken) -> list[T]:
        """Return the results in order. If one call raises or the caller is cancelled, the other calls are cancelled.
        When this returns or raises, no call writes to its memory any more. Of several errors, the first is raised.
        """
        futures = [self._threads.submit(call) for call in calls]
        works = [asyncio.wrap_future(future) for future in futures]
        failure: BaseException | None = None
        running = set(works)
        while running and not (failure is not None and self._may_abandon(cancel_token, len(running))):
            try:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                failure = error  # cancellation takes precedence over errors of the calls
                cancel_token.set()
                continue
            for error_of_one in [work.exception() for work in done]:  # marks each exception as retrieved
                if error_of_one is not None and failure is None:
                    failure = error_of_one
                    cancel_token.set()
        if failure is None:
            return [work.result() for work in works]
        self._abandon([future for future in futures if not future.done()])
        for work in running:
            work.cancel()  # its result is dropped
        raise failure

    def _may_abandon(self, cancel_token: CancelToken, running: int) -> bool:
        return cancel_token.is_quiet and len(self._abandoned) + running <= MAX_ABANDONED

    def _abandon(self, futures: Sequence[Future[T]]) -> None:
        for future in futures:
            stray: Future[object] = future  # type: ignore[assignment]  # a set of any kind
            self._abandoned.add(stray)
            stray.add_done_callback(self._abandoned.discard)
