"""Reading bytes of an object in S3: ranged GETs whose head is held against what was asked for, and whose body is whole.

A GET blocks, in a thread of the store's pool; a `CancelToken` ends it from another thread at once. Reads are given up
at once, though a thread may have to wait for an endpoint's silence to end: a read that is told to end while its body
arrives is interrupted, and waited for, as it has the caller's memory. One that waits for an answer's head can't be, but
will not touch the memory any more: it is left to its thread.
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
from kelvin.blobstore.s3_client import status_of, translated
from kelvin.blobstore.s3_location import S3Location

# Between two looks at the halt. The client holds each piece in memory of its own first: larger ones are no faster,
# those of a quarter cost a fifth more of the processor.
_PIECE_BYTES: Final = 1 << 20
_WORTH_BYTES: Final = 256 << 10  # that a cut answer brought: the next one begins after them
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
T = TypeVar("T")
MAX_ABANDONED: Final = 8  # are left to themselves at once: they take up threads of the store


class ReadCancelled(Exception):
    """The call was told to end. Never leaves the store: whoever halts has an error of its own to raise."""


class CancelToken:
    """Ends calls from another thread: what waits for a body wakes up, what has not begun does not begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: set[Any] = set()
        self._set = False

    def __repr__(self) -> str:
        return f"<Halt set={self._set} bodies={len(self._bodies)}>"

    def set(self) -> None:
        """Any number of times."""
        with self._lock:
            self._set = True
            for body in self._bodies:
                _interrupt(body)

    @property
    def is_quiet(self) -> bool:
        """Set, and no body is being read: none will be any more."""
        with self._lock:
            return self._set and not self._bodies

    def check(self) -> None:
        """Raise `ReadCancelled` if it is set."""
        if self._set:
            raise ReadCancelled

    @contextmanager
    def read_body(self, body: Any) -> Iterator[None]:
        """While the block reads `body`. Whatever breaks because of the halt is `ReadCancelled`."""
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
    """Shut the reading side of its connection, so that a read in another thread ends now."""
    with suppress(Exception):  # it has ended by itself, or this version can't: then the read timeout ends it
        body._raw_stream.shutdown()


@dataclass(frozen=True, slots=True)
class ObjectStart:
    """The first bytes from an offset on, and what the answer says of the object."""

    data: bytearray
    size: int
    etag: str


class _Cut(BlobUnavailable):
    """A body ended after `done` bytes of what it should be."""

    def __init__(self, reason: str, done: int) -> None:
        super().__init__(reason)
        self.done = done


def get_range(
    client: Any, place: S3Location, key: str, offset: int, into: memoryview, etag: str | None, cancel_token: CancelToken
) -> str:
    """Fill `into` from `offset`, of the object with that `etag` where one is given. Returns the object's. After a cut
    the next answer begins where it was, of the same object, as long as each brings something worth a request.

    Raises `BlobNotFound`, `BlobShort` where the object ends before, `BlobUnavailable` for all else: also for an answer
    that is not the range that was asked for, or ends before it should.
    """
    done = 0
    while True:
        with _opened(client, place, key, offset + done, into.nbytes - done, etag, cancel_token) as (body, head):
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
    client: Any, place: S3Location, key: str, offset: int, limit: int, cancel_token: CancelToken
) -> ObjectStart:
    """At most `limit` bytes from `offset` on. Raises as `get_range`; `BlobShort` where no byte is."""
    with _opened(client, place, key, offset, limit, None, cancel_token) as (body, head):
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
    client: Any, place: S3Location, key: str, offset: int, length: int, etag: str | None, cancel_token: CancelToken
) -> Iterator[tuple[Any, _Head]]:
    """An answer's body, which is the range as far as the object goes, while the block reads it."""
    cancel_token.check()
    where = f"bytes={offset}-{offset + length - 1}"
    condition = {} if etag is None else {"IfMatch": etag}
    try:
        with translated(key):
            answer = client.get_object(Bucket=place.bucket, Key=place.prefix + key, Range=where, **condition)
    except BlobUnavailable as unavailable:
        if status_of(unavailable) == 416:
            raise BlobShort(key, offset, length) from None
        raise
    body = answer["Body"]
    try:
        head = _checked(answer, offset, length)
        if etag is not None and head.etag != etag:  # an endpoint without If-Match, or a cache before it
            raise BlobUnavailable("S3 answered of another object than was asked for")
        with cancel_token.read_body(body):
            yield body, head
    finally:
        body.close()


def _checked(answer: Any, offset: int, length: int) -> _Head:
    """The answer is the range that was asked for, cut only by the object's end, and says the same of its body."""
    said = str(answer.get("ContentRange", ""))
    parsed = _CONTENT_RANGE.fullmatch(said)
    first, last, size = map(int, parsed.groups()) if parsed else (-1, -1, -1)
    end = min(offset + length, size)
    if (first, last) != (offset, end - 1):
        raise BlobUnavailable(f"S3 answered another range than bytes {offset}+{length}: '{said[:80]}'")
    if answer.get("ContentLength") != end - offset:
        raise BlobUnavailable(f"S3 answered {answer.get('ContentLength')} bytes of {end - offset}")
    return _Head(end - offset, size, str(answer.get("ETag", "")))


def _fill(body: Any, into: memoryview, cancel_token: CancelToken) -> None:
    done = 0
    while done < into.nbytes:
        cancel_token.check()
        try:
            count = body.readinto(into[done : done + _PIECE_BYTES])
        except Exception as error:  # botocore lets some of the transport's own errors through
            raise _Cut(f"an answer of S3 broke off: {type(error).__name__}", done) from error
        if count == 0:
            raise _Cut(f"an answer of S3 ended after {done} of {into.nbytes} bytes", done)
        done += count


class RangeCalls:
    """Runs calls that each read under a `CancelToken`, or into memory of their own."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._abandoned: set[Future[object]] = set()

    def __repr__(self) -> str:
        return f"<RangeCalls strays={len(self._abandoned)}>"

    async def run(self, calls: Sequence[Callable[[], T]], cancel_token: CancelToken) -> list[T]:
        """The results, in order. Once one raises or the caller is cancelled, the others are halted; when this returns
        or raises, nothing writes to the memory of any. Of several errors the first is raised.
        """
        futures = [self._threads.submit(call) for call in calls]
        works = [asyncio.wrap_future(future) for future in futures]
        failure: BaseException | None = None
        running = set(works)
        while running and not (failure is not None and self._may_abandon(cancel_token, len(running))):
            try:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                failure = error  # it matters more than what a call said
                cancel_token.set()
                continue
            for error_of_one in [work.exception() for work in done]:  # each is seen
                if error_of_one is not None and failure is None:
                    failure = error_of_one
                    cancel_token.set()
        if failure is None:
            return [work.result() for work in works]
        self._abandon([future for future in futures if not future.done()])
        for work in running:
            work.cancel()  # nobody hears of it any more
        raise failure

    def _may_abandon(self, cancel_token: CancelToken, running: int) -> bool:
        return cancel_token.is_quiet and len(self._abandoned) + running <= MAX_ABANDONED

    def _abandon(self, futures: Sequence[Future[T]]) -> None:
        for future in futures:
            stray: Future[object] = future  # type: ignore[assignment]  # a set of any kind
            self._abandoned.add(stray)
            stray.add_done_callback(self._abandoned.discard)
