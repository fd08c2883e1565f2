"""Multipart uploads: an object from pieces, made visible by one conditional call at the end, or by none.

Parts go up side by side, each repeated on its own, since the pieces of a stream are gone after a first attempt at the
whole. An upload that is not completed is aborted, whoever ends it; what a crash leaves behind, `abort_leftovers` finds.
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
from kelvin.blobstore.s3_client import error_of, head, is_refused_condition, put, translated
from kelvin.blobstore.s3_location import S3Location
from kelvin.contracts.errors import CapacityExceeded, Refused
from kelvin.process.thread_calls import run_uncancellable

log = logging.getLogger(__name__)

T = TypeVar("T")

PART_BYTES: Final = 8 << 20
# S3 takes 10,000 parts, each of 5 MiB to 5 GiB. How many come is not known before, so later ones are larger; the first
# half is equal, as some endpoints want all of them.
EQUAL_PARTS: Final = 5_000
DOUBLED_EVERY: Final = 500
_DOUBLINGS: Final = 9
OBJECT_BYTES: Final = 5 << 40  # S3's largest
PARTS_AT_ONCE: Final = 4  # of one upload: bounds its memory to five parts
GATHERED_BYTES: Final = 256 << 20  # and these, where parts are large, to so much, or to one part
LEFTOVER_AGE: Final = timedelta(days=1)


class _Part(io.BytesIO):
    """What has no `read` is sent in one call, for which the socket gives no more time than to connect."""

    def __len__(self) -> int:
        return self.getbuffer().nbytes


@dataclass(frozen=True, slots=True)
class Uploads:
    """What every upload of a store uses."""

    client: Any
    place: S3Location
    threads: Executor
    retry: Retry
    part_bytes: int = PART_BYTES  # of the first ones
    object_bytes: int = OBJECT_BYTES

    async def put(self, key: str, pieces: AsyncIterator[bytes]) -> bool:
        """As `BlobStore.put_if_absent`. Tries each call again by itself: not to be repeated as a whole.

        Raises `Refused(CapacityExceeded)` where no object is so large.
        """
        if await self.exists(key):
            return False
        async with aclosing(_parts(pieces, self.part_bytes, self.object_bytes)) as parts:
            first = await anext(parts)
            second = await anext(parts, None)
            if second is None:  # one part is an object: no upload to begin, complete or abort
                return await self._call(partial(put, self.client, self.place, key, first.getvalue()), len(first))
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
        """Whether the object is there, whole and durable as every object of S3."""
        try:
            await self._call(partial(head, self.client, self.place, key))
        except BlobNotFound:
            return False
        return True

    async def abort_leftovers(self) -> int:
        """Abort uploads below our prefix that began more than a day ago by the server's clock. Returns how many."""
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
        """A try whose answer is lost leaves an upload that nobody knows: a leftover, a day later."""
        with translated(key):
            answer = self.client.create_multipart_upload(Bucket=self.place.bucket, Key=self.place.prefix + key)
            return str(answer["UploadId"])

    async def _send_all(self, key: str, upload: str, begun: Sequence[_Part], parts: AsyncIterator[_Part]) -> list[str]:
        """The parts' tags, in order. When it returns or raises, no part is on its way."""
        sending: list[asyncio.Task[str]] = []
        running: set[asyncio.Task[str]] = set()

        async def at_most(count: int) -> None:
            while len(running) > count:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running.difference_update(done)
                for task in done:
                    task.result()  # one that failed ends it all

        async def begin(data: _Part) -> None:
            await at_most(PARTS_AT_ONCE - 1)
            call = partial(self._send, key, upload, len(sending) + 1, data)
            sending.append(asyncio.create_task(self._call(call, len(data))))
            running.add(sending[-1])
            # The next one, at least as large, is gathered beside these.
            await at_most(max(0, GATHERED_BYTES // len(data) - 1))

        try:
            for data in begun:
                await begin(data)
            async for data in parts:
                await begin(data)
                del data  # or it would stay while the next one is gathered
            return list(await asyncio.gather(*sending))
        finally:
            await cancel_and_wait(sending)

    def _send(self, key: str, upload: str, number: int, data: _Part) -> str:
        data.seek(0)  # it stands at its end: as it was written, or sent before
        with translated(key):
            answer = self.client.upload_part(
                Bucket=self.place.bucket, Key=self.place.prefix + key, UploadId=upload, PartNumber=number, Body=data
            )
            return str(answer["ETag"])

    async def _complete(self, key: str, upload: str, tags: list[str]) -> bool:
        """True where this upload became the object. A 409, or an upload that is gone after a lost answer, is settled
        by looking: the object is there, or the put failed.
        """
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]

        def complete() -> bool:
            try:
                with translated(key):
                    self.client.complete_multipart_upload(
                        Bucket=self.place.bucket,
                        Key=self.place.prefix + key,
                        UploadId=upload,
                        MultipartUpload={"Parts": parts},
                        IfNoneMatch="*",
                    )
            except BlobUnavailable as unavailable:
                if is_refused_condition(unavailable):
                    return False
                if _must_begin_again(unavailable):
                    raise _Lost from unavailable
                raise
            return True

        try:
            return await self._call(complete)
        except _Lost as lost:
            if await self.exists(key):
                return False
            raise BlobUnavailable("an upload did not become an object; its pieces have to come again") from lost

    async def _abort(self, key: str, upload: str) -> None:
        """To its end, also for a caller that is cancelled. What can't be aborted now is aborted as a leftover."""
        try:
            await run_uncancellable(self.threads, self._abort_now, self.place.prefix + key, upload)
        except (BlobUnavailable, StoreFull) as error:
            log.warning("an upload could not be aborted", extra={"key": key, "error": error.reason})

    def _abort_now(self, name: str, upload: str) -> None:
        try:
            with translated(name):
                self.client.abort_multipart_upload(Bucket=self.place.bucket, Key=name, UploadId=upload)
        except BlobUnavailable as unavailable:
            if not _is_gone(unavailable):
                raise

    def _list_old(self, markers: dict[str, str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
        """A page of uploads that are old enough: names with their ids, and where the next page begins."""
        with translated(self.place.prefix):
            answer = self.client.list_multipart_uploads(Bucket=self.place.bucket, Prefix=self.place.prefix, **markers)
            now = _date_of(answer)
            rows = [row for row in answer.get("Uploads", ()) if now - row["Initiated"] > LEFTOVER_AGE]
            following: dict[str, str] = {}
            if answer.get("IsTruncated"):
                following = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
            if following and following == markers:
                raise BlobUnavailable("S3 named the same next page of a listing of uploads twice")
            return [(row["Key"], row["UploadId"]) for row in rows], following


class _Lost(Exception):
    """This upload can't be completed any more, if it was not already."""


def _is_gone(error: BlobUnavailable) -> bool:
    return isinstance(error.__cause__, ClientError) and error_of(error.__cause__)[0] == "NoSuchUpload"


def _must_begin_again(error: BlobUnavailable) -> bool:
    """The answers after which S3 asks for a new upload: its own word is that the conflict ended this one."""
    return _is_gone(error) or (isinstance(error.__cause__, ClientError) and error_of(error.__cause__)[1] == 409)


def _date_of(answer: Any) -> datetime:
    """The server's clock; ours where it tells none."""
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(said)
    except (TypeError, ValueError):
        return datetime.now(UTC)


def bytes_of_part(first: int, number: int) -> int:
    """How large a part is (the last one may be smaller), `number` from 0 on, where the first one has `first`."""
    return first << min(_DOUBLINGS, max(0, (number - EQUAL_PARTS) // DOUBLED_EVERY + 1))


async def _parts(pieces: AsyncIterator[bytes], first: int, limit: int) -> AsyncGenerator[_Part]:
    """The same bytes in parts of those sizes; one empty part where there are none. Each is the receiver's own: it may
    be too large to be copied. Raises CapacityExceeded at more than `limit`.
    """
    number, total = 0, 0
    part, size = _Part(), first
    async for piece in pieces:
        total += len(piece)
        if total > limit:
            raise Refused(CapacityExceeded("bytes of one object in S3", total, limit))
        left = memoryview(piece)
        while left:
            if len(part) == size:  # and it is not the last one
                yield part
                number += 1
                part, size = _Part(), bytes_of_part(first, number)
            room = size - len(part)
            part.write(left[:room])
            left = left[room:]
    yield part
