"""A multipart upload becomes an object with its last call, or leaves nothing, whatever fails in between."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from kelvin.blobstore import s3_upload
from kelvin.blobstore.blob_store import BlobUnavailable
from kelvin.blobstore.s3_location import S3Location
from kelvin.blobstore.s3_upload import OBJECT_BYTES, PART_BYTES, Uploads, bytes_of_part
from kelvin.contracts.errors import CapacityExceeded, Refused
from tests.faults.http_faults import (
    CONFLICT,
    SLOW_DOWN,
    AlteredBody,
    DelayedAnswer,
    Exchange,
    Fault,
    LostAnswer,
    S3Error,
)
from tests.kelvin.blobstore.s3_world import BODY, PART, QUICK, World
from tests.kelvin.blobstore.suite import breaking, pieces

PARTS = len(BODY) // PART


def test_failed_parts_are_uploaded_again(world: World) -> None:
    """A refused part and a part with a lost response are uploaded again. The source is read once."""
    world.proxy.inject(SLOW_DOWN, method="PUT", holding="partNumber=2")
    world.proxy.inject(LostAnswer(), method="PUT", holding="partNumber=5")
    assert asyncio.run(world.store(part_bytes=PART).put_if_absent("t/a", pieces()))
    assert world.fetch("t/a") == BODY
    assert world.proxy.count("PUT") == PARTS + 2
    assert world.proxy.count("POST") == 2
    assert world.uploads() == []


@pytest.mark.parametrize(
    ("method", "holding"),
    [
        pytest.param("PUT", "partNumber=3", id="a part"),
        pytest.param("PUT", f"partNumber={PARTS}", id="the last part"),
        pytest.param("POST", "uploadId", id="its completion"),
    ],
)
def test_failed_upload_is_aborted(world: World, method: str, holding: str) -> None:
    """The failure is raised, the upload is aborted, and the key can be put afterwards."""
    store = world.store(part_bytes=PART)
    with world.proxy.faulty(SLOW_DOWN, method=method, holding=holding), pytest.raises(BlobUnavailable):
        asyncio.run(store.put_if_absent("t/a", pieces()))
    assert world.uploads() == []
    assert asyncio.run(store.put_if_absent("t/a", pieces()))
    assert world.fetch("t/a") == BODY


def test_a_source_that_breaks_leaves_no_upload(world: World) -> None:
    """The source's exception is raised, and the upload is aborted."""
    with pytest.raises(ConnectionResetError):
        asyncio.run(world.store(part_bytes=2).put_if_absent("t/a", breaking(after=3)))
    assert world.proxy.count("POST") == 1
    assert world.uploads() == []


async def test_cancelled_while_parts_are_on_their_way(world: World) -> None:
    """A cancelled put waits for its parts and aborts the upload."""
    store = world.store(part_bytes=PART)
    world.proxy.inject(DelayedAnswer(), method="PUT", times=None)

    put = asyncio.create_task(store.put_if_absent("t/a", pieces()))
    await asyncio.to_thread(world.proxy.wait_until_seen, 3, "PUT")
    put.cancel()
    put.cancel()
    world.proxy.lift()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert world.proxy.count("PUT") <= PARTS
    assert world.uploads() == []


async def test_few_parts_are_in_memory(world: World) -> None:
    """The source is read at most six parts ahead of the uploaded ones."""
    store = world.store(part_bytes=PART)
    given = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(40):
            given += 1
            yield bytes(PART)

    world.proxy.inject(DelayedAnswer(), method="PUT", times=None)
    put = asyncio.create_task(store.put_if_absent("t/a", counted()))
    await asyncio.to_thread(world.proxy.wait_until_seen, 4, "PUT")
    for _ in range(100):  # give the put time to read more, if it would
        await asyncio.sleep(0)
    assert given <= 6
    world.proxy.lift()
    assert await put
    assert given == 40


def _first(act: Fault | None, world: World, body: bytes) -> Fault:
    """Return a fault that puts another object just before the upload is completed."""

    def fault(exchange: Exchange) -> None:
        world.plant("t/a", body)
        (act or (lambda passing: passing.send(passing.ask())))(exchange)

    return fault


@pytest.mark.parametrize(
    "answer",
    [pytest.param(None, id="412"), pytest.param(CONFLICT, id="409"), pytest.param(LostAnswer(), id="a lost 412")],
)
def test_another_put_was_quicker(world: World, answer: Fault | None) -> None:
    """A put that another one overtook returns False, in each form of the response. No upload is left."""
    world.proxy.inject(_first(answer, world, b"theirs"), method="POST", holding="uploadId")
    assert asyncio.run(world.store(part_bytes=PART).put_if_absent("t/a", pieces())) is False
    assert world.fetch("t/a") == b"theirs"
    assert world.uploads() == []


def test_a_conflict_without_a_winner(world: World) -> None:
    """After a conflict without an object, the put is unavailable, because its source must be read again."""
    world.proxy.inject(CONFLICT, method="POST", holding="uploadId")
    with pytest.raises(BlobUnavailable):
        asyncio.run(world.store(part_bytes=PART).put_if_absent("t/a", pieces()))
    assert world.uploads() == []


def test_a_completion_whose_answer_was_lost(world: World) -> None:
    """The object is complete. The result isn't asserted: endpoints differ in their reply to a repeated completion."""
    world.proxy.inject(LostAnswer(), method="POST", holding="uploadId")
    asyncio.run(world.store(part_bytes=PART).put_if_absent("t/a", pieces()))
    assert world.fetch("t/a") == BODY
    assert world.uploads() == []


def test_a_large_payload_is_repeated_by_the_caller_alone(world: World) -> None:
    """The put fails at its first refused part. The retrying wrapper repeats the whole put, which is in memory."""
    store = world.store(part_bytes=PART)
    world.proxy.inject(SLOW_DOWN, method="PUT", holding="partNumber=2")
    with pytest.raises(BlobUnavailable):
        asyncio.run(store.put_if_absent("t/a", BODY))
    assert world.uploads() == []
    world.proxy.inject(SLOW_DOWN, method="PUT", holding="partNumber=2")
    assert asyncio.run(world.retrying(store).put_if_absent("t/a", BODY))
    assert world.fetch("t/a") == BODY


def _begun(when: datetime) -> Fault:
    """Return a fault that sets the start time of listed uploads. In moto, all uploads start in 2010."""
    said = when.strftime("<Initiated>%Y-%m-%dT%H:%M:%S.000Z<").encode()
    return AlteredBody(lambda body: body.replace(b"<Initiated>2010-11-10T20:48:33.000Z<", said))


def test_leftovers_are_aborted(world: World) -> None:
    """Only uploads below the store's prefix that are older than a day are aborted."""
    store = world.store()
    world.begin_upload("t/a")
    world.begin_upload("t/b")
    world.buckets.ask("POST", f"{world.bucket}/q/theirs?uploads")
    world.proxy.inject(_begun(datetime.now(UTC)), method="GET")
    assert asyncio.run(store.uploads.abort_leftovers()) == 0
    assert len(world.uploads()) == 3
    assert asyncio.run(store.uploads.abort_leftovers()) == 2
    assert world.uploads() == ["q/theirs"]


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (507, "XMinioStorageFull")])
def test_an_abort_that_fails_hides_nothing(world: World, status: int, code: str) -> None:
    """The raised error is the upload's, not the abort's. The upload stays as a leftover."""
    world.proxy.inject(S3Error(status, code), method="DELETE")
    with pytest.raises(ConnectionResetError):
        asyncio.run(world.store(part_bytes=2).put_if_absent("t/a", breaking(after=3)))
    assert world.uploads() == ["p/t/a"]


PARTS_OF_S3 = 10_000


class StrictS3:
    """An in-memory S3 client with S3's limit on the number of parts. Parts from number `held` on wait for `free`."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.object: bytes | None = None
        self.held = PARTS_OF_S3 + 1
        self.reached, self.free = threading.Event(), threading.Event()

    def head_object(self, **call: Any) -> None:
        raise _error("404", 404)

    def create_multipart_upload(self, **call: Any) -> dict[str, str]:
        return {"UploadId": "u"}

    def upload_part(self, **call: Any) -> dict[str, str]:
        number = call["PartNumber"]
        if number > PARTS_OF_S3:
            raise _error("InvalidArgument", 400)
        if number >= self.held:
            self.reached.set()
            assert self.free.wait(30)
        self.parts[number] = call["Body"].read()  # like the library, one call reads the whole body
        return {"ETag": str(number)}

    def complete_multipart_upload(self, **call: Any) -> None:
        self.object = b"".join(self.parts[part["PartNumber"]] for part in call["MultipartUpload"]["Parts"])

    def abort_multipart_upload(self, **call: Any) -> None:
        self.parts.clear()


def _error(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "a call")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


async def _cut(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def test_more_than_fits_ten_thousand_equal_parts(threads: ThreadPoolExecutor) -> None:
    """Later parts grow, so that S3's limit on parts is kept. The first half has equal parts."""
    client = StrictS3()
    data = bytes(range(250)) * 800
    assert len(data) > 16 * PARTS_OF_S3
    uploads = Uploads(client, S3Location("bucket"), threads, QUICK, part_bytes=16)
    assert asyncio.run(uploads.put("t/a", _cut(data, 1000)))
    assert client.object == data
    sizes = [len(client.parts[number]) for number in sorted(client.parts)]
    assert set(sizes[:5000]) == {16}
    assert sizes[:-1] == sorted(sizes[:-1])


def test_the_largest_object_fits() -> None:
    """The largest object fits into the parts that S3 allows, and each part is within S3's size limits."""
    sizes = [bytes_of_part(PART_BYTES, number) for number in range(PARTS_OF_S3)]
    assert sum(sizes) >= OBJECT_BYTES
    assert (min(sizes), max(sizes)) == (8 << 20, 4 << 30)


def test_too_large_for_s3(threads: ThreadPoolExecutor) -> None:
    """An object above the limit is refused for good, and nothing stays. One of exactly the limit is accepted."""
    client = StrictS3()
    uploads = Uploads(client, S3Location("bucket"), threads, QUICK, part_bytes=16, object_bytes=100)
    with pytest.raises(Refused) as caught:
        asyncio.run(uploads.put("t/a", _cut(bytes(101), 7)))
    assert caught.value.failure == CapacityExceeded("bytes of one object in S3", 101, 100)
    assert not caught.value.failure.retryable
    assert (client.parts, client.object) == ({}, None)
    assert asyncio.run(uploads.put("t/a", _cut(bytes(100), 7)))
    assert client.object == bytes(100)


async def test_a_large_part_is_alone_in_memory(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a part larger than the upload's memory limit is uploaded, the next one isn't gathered."""
    monkeypatch.setattr(s3_upload, "EQUAL_PARTS", 2)
    monkeypatch.setattr(s3_upload, "DOUBLED_EVERY", 1)
    monkeypatch.setattr(s3_upload, "GATHERED_BYTES", 64)
    client, data = StrictS3(), bytes(range(256)) * 3
    client.held = 5
    given = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal given
        async for piece in _cut(data, 8):
            given += len(piece)
            yield piece

    uploads = Uploads(client, S3Location("bucket"), threads, QUICK, part_bytes=16)
    put = asyncio.create_task(uploads.put("t/a", counted()))
    await asyncio.to_thread(client.reached.wait, 30)
    for _ in range(100):  # give the put time to read more, if it would
        await asyncio.sleep(0)
    assert given == 16 + 16 + 32 + 64 + 128 + 8  # the last 8 bytes are the piece that shows that more follows
    client.free.set()
    assert await put
    assert client.object == data
