"""Multipart uploads: one conditional call at the end makes the object visible.

Parts are sent in parallel. Each part is retried by itself, because the pieces of a stream are gone after one attempt at
the whole. An incomplete upload is aborted, on errors and on cancellation. `abort_leftovers` aborts those of a crash.
"""

import asyncio
import io
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final, TypeVar

from botocore.exceptions import ClientError

from kelvin.blobstore.blob_store import BlobNotFound, BlobUnavailable, StoreFull
from kelvin.blobstore.bounded_gather import cancel_and_wait
from kelvin.blobstore.retrying_store import Retry
from kelvin.blobstore.s3_client import error_of, head, is_refused_condition, put, translate_errors
from kelvin.blobstore.s3_location import S3Location
from kelvin.contracts.errors import CapacityExceeded, Refused
from kelvin.process.thread_calls import run_uncancellable

log = logging.getLogger(__name__)

T = TypeVar("T")

PART_BYTES: Final = 8 << 20
# S3 allows 10,000 parts of 5 MiB to 5 GiB each. Their number is unknown in advance, so later parts are larger. The
# first half has equal parts, because some endpoints want all parts equal.
EQUAL_PARTS: Final = 5_000
DOUBLED_EVERY: Final = 500
_DOUBLINGS: Final = 9
OBJECT_BYTES: Final = 5 << 40  # largest object in S3
PARTS_AT_ONCE: Final = 4  # per upload; limits its memory to five parts
GATHERED_BYTES: Final = 256 << 20  # limit of the memory of large parts, or one part
LEFTOVER_AGE: Final = timedelta(days=1)


class _Part(io.BytesIO):
    """A part's bytes with a `read` method. Without one, the connect timeout would limit the whole body."""

    def __len__(self) -> int:
        return self.getbuffer().nbytes


@dataclass(frozen=True, slots=True)
class Uploads:
    """The client, location, threads and sizes that all uploads of a store share."""

    client: Any
    location: S3Location
    threads: Executor
    retry: Retry
    part_bytes: int = PART_BYTES  # size of the first parts
    object_bytes: int = OBJECT_BYTES

    async def put(self, key: str, pieces: AsyncIterator[bytes]) -> bool:
        """Create the object as `BlobStore.put_if_absent` does. Retries each call itself, so don't retry the whole.
        Raises `Refused(CapacityExceeded)` if S3 allows no object of this size.
        """
        if await self.exists(key):
            return False
        async with aclosing(_parts(pieces, self.part_bytes, self.object_bytes)) as parts:
            first = await anext(parts)
            second = await anext(parts, None)
            if second is None:  # one part is the whole object: no upload needed
                return await self._call(partial(put, self.client, self.location, key, first.getvalue()), len(first))
            upload = await self._call(partial(self._create, key))
            completed = False
            try:
                tags = await self._send_all(key, upload, (first, second), parts)
                completed = await self._complete(key, upload, tags)
            finally:
                if not completed:
                    await self._abort(key, upload)
            return completed

    async def exists(self, key: str) -> bool:
        """Return whether the object exists. Every object in S3 is whole and durable."""
        try:
            await self._call(partial(head, self.client, self.location, key))
        except BlobNotFound:
            return False
        return True

    async def abort_leftovers(self) -> int:
        """Abort uploads below our prefix that began more than a day ago by the server's clock. Return how many."""
        aborted = 0
        markers: dict[str, str] = {}
        while True:
            old, markers = await self._call(partial(self._list_old, markers))
            for name, upload in old:
                await self._call(partial(self._abort_now, name, upload))
            aborted += len(old)
            if not markers:
                return aborted

    async def _call(self, function: Callable[[], T], size: int = 0) -> T:
        return await self.retry(lambda: run_uncancellable(self.threads, function), size)

    def _create(self, key: str) -> str:
        """Start an upload and return its id. If the response is lost, the upload becomes a leftover."""
        with translate_errors(key):
            answer = self.client.create_multipart_upload(Bucket=self.location.bucket, Key=self.location.prefix + key)
            return str(answer["UploadId"])

    async def _send_all(
        self, key: str, upload: str, first_parts: Sequence[_Part], parts: AsyncIterator[_Part]
    ) -> list[str]:
        """Return the ETags of the parts, in order. When this returns or raises, no part is being sent."""
        sending: list[asyncio.Task[str]] = []
        running: set[asyncio.Task[str]] = set()

        async def wait_until_at_most(count: int) -> None:
            while len(running) > count:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running.difference_update(done)
                for task in done:
                    task.result()  # a failed part ends the upload

        async def begin(data: _Part) -> None:
            await wait_until_at_most(PARTS_AT_ONCE - 1)
            call = partial(self._send, key, upload, len(sending) + 1, data)
            sending.append(asyncio.create_task(self._call(call, len(data))))
            running.add(sending[-1])
            # The next part, at least as large, is collected while these are sent.
            await wait_until_at_most(max(0, GATHERED_BYTES // len(data) - 1))

        try:
            for data in first_parts:
                await begin(data)
            async for data in parts:
                await begin(data)
                del data  # otherwise it would stay in memory while the next part is collected
            return list(await asyncio.gather(*sending))
        finally:
            await cancel_and_wait(sending)

    def _send(self, key: str, upload: str, number: int, data: _Part) -> str:
        data.seek(0)  # the position is at its end, after writing or an earlier attempt
        with translate_errors(key):
            answer = self.client.upload_part(
                Bucket=self.location.bucket,
                Key=self.location.prefix + key,
                UploadId=upload,
                PartNumber=number,
                Body=data,
            )
            return str(answer["ETag"])

    async def _complete(self, key: str, upload: str, tags: list[str]) -> bool:
        """Complete the upload. Return True if this upload became the object. After a 409, or if the upload is gone
        after a lost response, look for the object: it exists, or the put failed.
        """
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]

        def complete() -> bool:
            try:
                with translate_errors(key):
                    self.client.complete_multipart_upload(
                        Bucket=self.location.bucket,
                        Key=self.location.prefix + key,
                        UploadId=upload,
                        MultipartUpload={"Parts": parts},
                        IfNoneMatch="*",
                    )
            except BlobUnavailable as unavailable:
                if is_refused_condition(unavailable):
                    return False
                if _must_begin_again(unavailable):
                    raise _UploadGone from unavailable
                raise
            return True

        try:
            return await self._call(complete)
        except _UploadGone as lost:
            if await self.exists(key):
                return False
            raise BlobUnavailable("an upload failed; its data must be sent again") from lost

    async def _abort(self, key: str, upload: str) -> None:
        """Abort the upload, even if the caller is cancelled. If that fails, the upload becomes a leftover."""
        try:
            await run_uncancellable(self.threads, self._abort_now, self.location.prefix + key, upload)
        except (BlobUnavailable, StoreFull) as error:
            log.warning("an upload could not be aborted", extra={"key": key, "error": error.reason})

    def _abort_now(self, name: str, upload: str) -> None:
        try:
            with translate_errors(name):
                self.client.abort_multipart_upload(Bucket=self.location.bucket, Key=name, UploadId=upload)
        except BlobUnavailable as unavailable:
            if not _is_gone(unavailable):
                raise

    def _list_old(self, markers: dict[str, str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
        """Return one page of old uploads: keys with ids, and the markers of the next page."""
        with translate_errors(self.location.prefix):
            answer = self.client.list_multipart_uploads(
                Bucket=self.location.bucket, Prefix=self.location.prefix, **markers
            )
            now = _date_of(answer)
            rows = [row for row in answer.get("Uploads", ()) if now - row["Initiated"] > LEFTOVER_AGE]
            following: dict[str, str] = {}
            if answer.get("IsTruncated"):
                following = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
            if following and following == markers:
                raise BlobUnavailable("S3 named the same next page of a listing of uploads twice")
            return [(row["Key"], row["UploadId"]) for row in rows], following


class _UploadGone(Exception):
    """This upload can no longer be completed, if it was not completed already."""


def _is_gone(error: BlobUnavailable) -> bool:
    return isinstance(error.__cause__, ClientError) and error_of(error.__cause__)[0] == "NoSuchUpload"


def _must_begin_again(error: BlobUnavailable) -> bool:
    """Return whether S3 requires a new upload: it is gone, or a conflict (409) ended it, as S3 documents."""
    return _is_gone(error) or (isinstance(error.__cause__, ClientError) and error_of(error.__cause__)[1] == 409)


def _date_of(answer: Any) -> datetime:
    """Return the time by the server's clock, or by ours if the response has none."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return datetime.now(UTC)


def bytes_of_part(first: int, number: int) -> int:
    """Return the size of part `number` (from 0), if the first part has `first` bytes. The last part may be smaller."""
    return first << min(_DOUBLINGS, max(0, (number - EQUAL_PARTS) // DOUBLED_EVERY + 1))


async def _parts(pieces: AsyncIterator[bytes], first: int, limit: int) -> AsyncGenerator[_Part]:
    """Yield the same bytes in parts of those sizes; one empty part if there are none. Raises CapacityExceeded over
    `limit`. The receiver owns each part, because a part may be too large to copy.
    """
    number, total = 0, 0
    part, size = _Part(), first
    async for piece in pieces:
        total += len(piece)
        if total > limit:
            raise Refused(CapacityExceeded("bytes of one object in S3", total, limit))
        left = memoryview(piece)
        while left:
            if len(part) == size:  # and more bytes follow
                yield part
                number += 1
                part, size = _Part(), bytes_of_part(first, number)
            room = size - len(part)
            part.write(left[:room])
            left = left[room:]
    yield part
