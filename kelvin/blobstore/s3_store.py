"""A store in a bucket of S3 or of a compatible service. `retrying_store.py` retries whole calls around it.

This store itself retries each request of a put of an iterator (`s3_upload.py`), and the rest of a read that was cut
(`s3_reads.py`). Reads are parallel ranged GETs in the store's own threads, pinned to one ETag if the endpoint sends
any. Puts are conditional, so exactly one wins. A cancelled read or listing ends at once, any other call within the
timeouts of the location.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from kelvin.blobstore.blob_store import (
    BlobShort,
    BlobStat,
    BlobUnavailable,
    Payload,
    StoreFull,
    check_key,
    check_prefix,
    check_range,
    is_segment,
)
from kelvin.blobstore.retrying_store import Retry, RetryBudget
from kelvin.blobstore.s3_client import delete, head, list_page, permanent_failure_reason, put
from kelvin.blobstore.s3_location import S3Location
from kelvin.blobstore.s3_reads import CancelToken, RangeCalls, get_range, get_start
from kelvin.blobstore.s3_upload import PART_BYTES, Uploads
from kelvin.contracts.errors import Refused
from kelvin.process.thread_calls import run_uncancellable

T = TypeVar("T")

# Half a chunk: one connection to S3 brings about 0.1 GB/s, so each chunk uses two.
READ_BYTES: Final = 4 << 20
_TAGS: Final = 4096
_PAGE_KEYS: Final = 1000
# No key of the protocol begins with a dot, so the probe never collides with an object.
_PROBE: Final = ".conditional-put"


class S3Store:
    """A `BlobStore` over a client from `make_client`, which it owns. `close` ends threads and connections."""

    def __init__(
        self,
        location: S3Location,
        client: Any,
        *,
        retry: Retry | None = None,
        part_bytes: int = PART_BYTES,
        read_bytes: int = READ_BYTES,
        page_keys: int = _PAGE_KEYS,
    ) -> None:
        self.location = location
        self._client = client
        self._threads = ThreadPoolExecutor(location.connections, "s3")
        self._calls = RangeCalls(self._threads)
        self.uploads = Uploads(self._client, location, self._threads, retry or Retry(), part_bytes)
        self._read_bytes = read_bytes
        self._page_keys = page_keys
        self._tags: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<S3Store {self.location}>"

    async def close(self) -> None:
        """Wait for running calls, then end threads and connections."""
        await run_uncancellable(None, self._threads.shutdown)
        self._client.close()

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        check_key(key)
        if not isinstance(data, bytes):
            return await self.uploads.put(key, data)
        if len(data) > self.uploads.part_bytes:  # the caller can send all of it again, so it retries the whole
            once = replace(self.uploads, retry=Retry(RetryBudget(attempts=1)))
            return await once.put(key, _slices(data, self.uploads.part_bytes))
        return await self._run(partial(put, self._client, self.location, key, data))

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read as `BlobStore.read` does. Without a length, a small object takes one round trip."""
        check_key(key)
        if length is not None and length > 0 and offset >= 0:
            into = bytearray(length)
            await self._read_into(key, offset, memoryview(into))
            return bytes(into)
        if length is None and offset >= 0:
            try:
                return await self._read_to_end(key, offset)
            except BlobShort:  # no byte at the offset: the rest is empty, or the object is shorter
                pass
        if check_range(key, (await self.stat(key)).size, offset, length):
            raise BlobUnavailable("S3 reported an empty range inside the object")
        return b""

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        check_key(key)
        if not into.nbytes or offset < 0:
            check_range(key, (await self.stat(key)).size, offset, into.nbytes)
        await self._read_into(key, offset, into.cast("B"))

    async def stat(self, key: str) -> BlobStat:
        check_key(key)
        found = await self._run(partial(head, self._client, self.location, key))
        self._remember(key, found.etag)
        return BlobStat(found.size, found.modified_s)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        """Yield keys as `BlobStore.list` does. Foreign objects whose names are not valid keys are skipped."""
        check_prefix(prefix)
        token: str | None = None
        last = ""
        while True:
            call = partial(list_page, self._client, self.location, prefix, token, self._page_keys)
            (page,) = await self._calls.run([call], CancelToken())
            if page.keys and page.keys[0] <= last:  # a listing that resumes after a break relies on the order
                raise BlobUnavailable("S3 returned pages of a listing out of order")
            if token is not None and page.next == token:
                raise BlobUnavailable("S3 named the same next page of a listing twice")
            last = page.keys[-1] if page.keys else last
            for key in page.keys:
                if all(map(is_segment, key.split("/"))):
                    yield key
            if (token := page.next) is None:
                return

    async def delete(self, key: str) -> None:
        check_key(key)
        self._tags.pop(key, None)
        await self._run(partial(delete, self._client, self.location, key))

    async def find_fault(self, *, writes: bool) -> str | None:
        """Return why this location can never work, in words, or None. A process that `writes` leaves one empty probe
        object. Raises `BlobUnavailable` for errors that may be temporary.
        """
        try:
            await self._run(partial(list_page, self._client, self.location, "", None, 1))
            if not writes:
                return None
            try_put = partial(put, self._client, self.location, _PROBE, b"")
            # The first put may create the object; the second one always finds it.
            if await self._run(try_put) and await self._run(try_put):
                return "this endpoint overwrites objects in spite of If-None-Match, which Kelvin can't do without"
        except StoreFull:
            return None  # reads still work, and each put reports the full store
        except BlobUnavailable as unavailable:
            if (hopeless := permanent_failure_reason(unavailable)) is None:
                raise
            return hopeless
        return None

    async def _run(self, call: Callable[[], T]) -> T:
        return await run_uncancellable(self._threads, call)

    async def _read_to_end(self, key: str, offset: int) -> bytes:
        halt = CancelToken()
        get = partial(get_start, self._client, self.location, key, offset, self._read_bytes, halt)
        (found,) = await self._calls.run([get], halt)
        self._remember(key, found.etag)
        head_bytes = len(found.data)
        if offset + head_bytes == found.size:
            return bytes(found.data)
        into = bytearray(found.size - offset)
        into[:head_bytes] = found.data
        await self._read_into(key, offset + head_bytes, memoryview(into)[head_bytes:])
        return bytes(into)

    async def _read_into(self, key: str, offset: int, into: memoryview) -> None:
        """Read in parallel ranges of one object: pinned to the known ETag, or to that of the first response."""
        starts = list(range(0, into.nbytes, self._read_bytes))
        tag = self._tags.get(key)
        try:
            if tag is None and starts:
                tag = (await self._ranges(key, offset, into, starts[:1], None))[0] or None
                starts = starts[1:]
            await self._ranges(key, offset, into, starts, tag)
        except Refused:
            self._tags.pop(key, None)  # it may be another object now: the next attempt reads that one
            raise
        if tag is not None:
            self._remember(key, tag)

    async def _ranges(
        self, key: str, offset: int, into: memoryview, starts: Sequence[int], tag: str | None
    ) -> Sequence[str]:
        """Read the ranges that begin at `starts`, and return their ETags."""
        halt = CancelToken()
        calls = [
            partial(
                get_range, self._client, self.location, key, offset + at, into[at : at + self._read_bytes], tag, halt
            )
            for at in starts
        ]
        return await self._calls.run(calls, halt)

    def _remember(self, key: str, tag: str) -> None:
        if tag:
            self._tags[key] = tag
            self._tags.move_to_end(key)
        if len(self._tags) > _TAGS:
            self._tags.popitem(last=False)


async def _slices(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
