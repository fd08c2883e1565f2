"""The verifying wrapper is a `BlobStore`. Objects named by their digest can't be written or read with other bytes."""

import asyncio
from pathlib import Path

import pytest
from blake3 import blake3

from kelvin.blobstore.blob_store import BlobCorrupt, BlobStore
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.blobstore.verifying_store import VerifyingStore
from tests.kelvin.blobstore.suite import BODY, BlobStoreSuite, keys_of, pieces

DIGEST = blake3(BODY).hexdigest()
KEY = f"t/packs/{DIGEST}"
FILE_KEY = f"{KEY}.tensors"
FLIPPED = bytes([BODY[0] ^ 1]) + BODY[1:]


class TestVerifyingStore(BlobStoreSuite):
    def open(self, path: Path) -> BlobStore:
        return VerifyingStore(MemoryStore())


@pytest.mark.parametrize("streamed", [pytest.param(False, id="bytes"), pytest.param(True, id="pieces")])
@pytest.mark.parametrize("key", [pytest.param(KEY, id="a pack"), pytest.param(FILE_KEY, id="a kept file")])
def test_put(key: str, streamed: bool) -> None:
    """A put whose bytes don't match the key's digest is refused and leaves nothing. A matching put is kept."""
    store = VerifyingStore(MemoryStore())
    with pytest.raises(BlobCorrupt, match=DIGEST):
        asyncio.run(store.put_if_absent(key, pieces(FLIPPED) if streamed else FLIPPED))
    assert asyncio.run(keys_of(store)) == []
    assert asyncio.run(store.put_if_absent(key, pieces() if streamed else BODY))


def test_read() -> None:
    """A read of flipped bytes raises `BlobCorrupt`. The negative control reads them without the wrapper."""
    inner = MemoryStore()
    asyncio.run(inner.put_if_absent(KEY, FLIPPED))
    assert asyncio.run(inner.read(KEY)) == FLIPPED
    with pytest.raises(BlobCorrupt, match=DIGEST):
        asyncio.run(VerifyingStore(inner).read(KEY))


def test_other_objects_pass() -> None:
    """Objects whose keys aren't digests are not verified."""
    store = VerifyingStore(MemoryStore())
    assert asyncio.run(store.put_if_absent(f"t/index/{DIGEST}", b"table"))
    assert asyncio.run(store.put_if_absent("t/packs/short", b"x"))
    assert asyncio.run(store.read(f"t/index/{DIGEST}")) == b"table"
