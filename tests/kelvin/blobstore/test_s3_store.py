"""The S3 store is a `BlobStore`: as it is used, and where every object comes in many parts, ranges and pages."""

from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BlobStore
from tests.kelvin.blobstore.s3_world import PART, World
from tests.kelvin.blobstore.suite import BlobStoreSuite


class TestS3Store(BlobStoreSuite):
    """In one piece."""

    @pytest.fixture(autouse=True)
    def _place(self, world: World) -> None:
        self._world = world

    def open(self, path: Path) -> BlobStore:
        return self._world.store()


class TestS3StoreOfParts(TestS3Store):
    """In many."""

    def open(self, path: Path) -> BlobStore:
        return self._world.store(part_bytes=PART, read_bytes=1000)
