"""The memory store is a `BlobStore`."""

from pathlib import Path

from blobstore.memory import MemoryStore
from blobstore.store import BlobStore
from tests.blobstore.suite import BlobStoreSuite


class TestMemoryStore(BlobStoreSuite):
    def open(self, path: Path) -> BlobStore:
        return MemoryStore()
