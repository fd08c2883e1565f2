"""The memory store is a `BlobStore`."""

from pathlib import Path

from kelvin.blobstore.blob_store import BlobStore
from kelvin.blobstore.memory_store import MemoryStore
from tests.kelvin.blobstore.suite import BlobStoreSuite


class TestMemoryStore(BlobStoreSuite):
    def open(self, path: Path) -> BlobStore:
        return MemoryStore()
