"""The S3 store is a `BlobStore`, with default sizes and with objects of many parts, ranges and pages."""

from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BlobStore
from tests.kelvin.blobstore.s3_world import PART, World
from tests.kelvin.blobstore.suite import BlobStoreSuite


class TestS3Store(BlobStoreSuite):
    """Default sizes: each object is one part."""

    @pytest.fixture(autouse=True)
    def _place(self, world: World) -> None:
        self._world = world

    def open(self, path: Path) -> BlobStore:
        return self._world.store()


class TestS3StoreOfParts(TestS3Store):
    """Small sizes: each object is many parts and ranges."""

    def open(self, path: Path) -> BlobStore:
        return self._world.store(part_bytes=PART, read_bytes=1000)
