"""The S3 store is a `BlobStore`, with small objects and with ones of many parts and ranges, alone and wrapped."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.s3 import S3Store
from blobstore.s3_client import make_client
from blobstore.s3_place import parse_place
from blobstore.store import BlobStore
from tests.blobstore.suite import BlobStoreSuite
from tests.faults.buckets import ENVIRONMENT, Buckets


@pytest.fixture(scope="module")
def client(buckets: Buckets) -> Iterator[Any]:
    """One for all: to make one costs more than a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        client = make_client(parse_place(buckets.url("any"), "KELVIN_STORE"))
        yield client
        client.close()


class S3Suite(BlobStoreSuite):
    """Each test has a prefix of its own in one bucket."""

    part_bytes = 8 << 20
    read_bytes = 4 << 20
    page_keys = 1000

    @pytest.fixture(autouse=True)
    def _place(self, buckets: Buckets, client: Any) -> Iterator[None]:
        self._opened: list[S3Store] = []
        self._url, self._client = buckets.url(buckets.make(), "some/prefix", connections=8), client
        yield
        for store in self._opened:
            asyncio.run(store.close())

    def open(self, path: Path) -> BlobStore:
        store = S3Store(
            parse_place(self._url, "KELVIN_STORE"),
            self._client,
            part_bytes=self.part_bytes,
            read_bytes=self.read_bytes,
            page_keys=self.page_keys,
        )
        self._opened.append(store)
        return store


class TestS3Store(S3Suite):
    """As it is used."""


class TestS3StoreOfParts(S3Suite):
    """Everything comes in many parts, ranges and pages."""

    part_bytes = 1024
    read_bytes = 1000
    page_keys = 2
