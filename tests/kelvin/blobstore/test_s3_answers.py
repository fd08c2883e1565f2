"""Responses that other S3 endpoints than the test server give, and whose literal meaning misleads."""

import asyncio
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from kelvin.blobstore.blob_store import BlobShort, BlobUnavailable, StoreFull
from kelvin.blobstore.retrying_store import Retry, RetryBudget
from kelvin.blobstore.s3_location import parse_s3_url
from kelvin.blobstore.s3_store import S3Store
from kelvin.contracts.errors import CapacityExceeded
from tests.eventually import PATIENCE_S

PLACE = parse_s3_url("s3://bucket/p")


def refused(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Call")


class Endpoint:
    """A client with one object of `size` bytes. Every call but `head_object` raises `refusal`."""

    def __init__(self, size: int, refusal: ClientError) -> None:
        self._size, self._refusal = size, refusal

    def head_object(self, **_: Any) -> Any:
        return {"ContentLength": self._size, "ETag": '"e"', "LastModified": datetime.now(UTC), "Body": io.BytesIO()}

    def get_object(self, **_: Any) -> Any:
        raise self._refusal

    def delete_object(self, **_: Any) -> Any:
        raise self._refusal

    def put_object(self, **_: Any) -> Any:
        raise self._refusal

    def close(self) -> None:
        """Do nothing: no connection is open."""


def call_store(endpoint: Endpoint, call: str, *arguments: Any) -> Any:
    async def call_and_close() -> Any:
        store = S3Store(PLACE, endpoint, retry=Retry(RetryBudget(attempts=1)))
        try:
            return await getattr(store, call)("t/a", *arguments)
        finally:
            await store.close()

    return asyncio.run(call_and_close())


def test_deleting_a_missing_key_succeeds() -> None:
    """Deleting a missing key succeeds. Amazon replies 204, other endpoints 404."""
    call_store(Endpoint(0, refused("NoSuchKey", 404)), "delete")
    with pytest.raises(BlobUnavailable):
        call_store(Endpoint(0, refused("SlowDown", 503)), "delete")


def test_an_object_with_bytes_is_never_read_as_empty() -> None:
    """A 416 response is read as an empty rest only if the object's size confirms it."""
    nothing_begins = refused("InvalidRange", 416)
    assert call_store(Endpoint(0, nothing_begins), "read") == b""
    assert call_store(Endpoint(7, nothing_begins), "read", 7) == b""
    with pytest.raises(BlobShort):
        call_store(Endpoint(7, nothing_begins), "read", 8)
    with pytest.raises(BlobUnavailable, match="object store"):
        call_store(Endpoint(7, nothing_begins), "read")
    with pytest.raises(BlobUnavailable, match="object store"):
        call_store(Endpoint(7, nothing_begins), "read", 3)


@pytest.mark.parametrize(
    ("code", "status"), [("XMinioStorageFull", 507), ("InsufficientStorage", 507), ("QuotaExceeded", 403)]
)
def test_full_store_raises_store_full(code: str, status: int) -> None:
    """A full store raises `StoreFull`, not `BlobUnavailable`, so it isn't retried."""
    endpoint = Endpoint(0, refused(code, status))
    with pytest.raises(StoreFull) as full:
        call_store(endpoint, "put_if_absent", b"x")
    assert full.value.failure == CapacityExceeded("bytes in the object store", 1, 0)


class Standstill(Endpoint):
    """A client whose listings repeat the same page forever."""

    def __init__(self) -> None:
        super().__init__(0, refused("SlowDown", 503))

    def list_objects_v2(self, **_: Any) -> Any:
        return {"Contents": [], "IsTruncated": True, "NextContinuationToken": "t"}

    def list_multipart_uploads(self, **_: Any) -> Any:
        return {"Uploads": [], "IsTruncated": True, "NextKeyMarker": "p/t/a", "NextUploadIdMarker": "u"}


async def test_listing_that_repeats_a_page_ends() -> None:
    """A listing whose next page is the same page again is unavailable instead of endless."""
    store = S3Store(PLACE, Standstill(), retry=Retry(RetryBudget(attempts=1)))
    try:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BlobUnavailable):
                [key async for key in store.list("t/")]
            with pytest.raises(BlobUnavailable):
                await store.uploads.abort_leftovers()
    finally:
        await store.close()
