"""Digest checks around any store. They cover objects whose last key segment is, or begins with, the BLAKE3 digest of
the object's bytes.

A whole object's digest can't check a range. The weight cache verifies chunks inside packs.
"""

import re
from collections.abc import AsyncIterator
from typing import Final

from blake3 import blake3

from kelvin.blobstore.blob_store import BlobCorrupt, BlobStat, BlobStore, Payload
from kelvin.contracts.artifact_errors import ManifestCorrupt, PackCorrupt
from kelvin.contracts.artifacts.object_keys import DRAFTS, MANIFESTS, PACKS, TENSORS_SUFFIX

_DIGEST: Final = re.compile(rf"([0-9a-f]{{64}})(?:{re.escape(TENSORS_SUFFIX)})?")


class VerifyingStore:
    """A store that checks puts and whole reads of objects in `kinds`, the second segment of `tenant/packs/DIGEST`. A
    put that doesn't match raises `BlobCorrupt` and stores nothing. A read that doesn't match returns nothing.
    """

    def __init__(self, inner: BlobStore, kinds: frozenset[str] = frozenset({PACKS, MANIFESTS, DRAFTS})) -> None:
        self._inner = inner
        self._kinds = kinds

    def __repr__(self) -> str:
        return f"<VerifyingStore {sorted(self._kinds)} {self._inner!r}>"

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        digest = self._digest_of(key)
        if digest is None:
            return await self._inner.put_if_absent(key, data)
        if isinstance(data, bytes):
            _check(key, data, digest)
            return await self._inner.put_if_absent(key, data)
        return await self._inner.put_if_absent(key, _checked(key, data, digest))

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        data = await self._inner.read(key, offset, length)
        digest = self._digest_of(key)
        if digest is not None and offset == 0 and length is None:
            _check(key, data, digest)
        return data

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        """Read a range, which is not checked."""
        await self._inner.read_into(key, offset, into)

    async def stat(self, key: str) -> BlobStat:
        return await self._inner.stat(key)

    def list(self, prefix: str) -> AsyncIterator[str]:
        return self._inner.list(prefix)

    async def delete(self, key: str) -> None:
        await self._inner.delete(key)

    def _digest_of(self, key: str) -> str | None:
        segments = key.split("/")
        named = _DIGEST.fullmatch(segments[2]) if len(segments) == 3 and segments[1] in self._kinds else None
        return None if named is None else named[1]


def _check(key: str, data: bytes, digest: str) -> None:
    if blake3(data).hexdigest() != digest:
        raise _corrupt(key, digest)


def _corrupt(key: str, digest: str) -> BlobCorrupt:
    failure = PackCorrupt if key.split("/")[1] == PACKS else ManifestCorrupt
    return BlobCorrupt(failure(digest, "its bytes in the store do not match its digest"))


async def _checked(key: str, pieces: AsyncIterator[bytes], digest: str) -> AsyncIterator[bytes]:
    """Yield the pieces, and raise after the last one if they don't match. The put then stores nothing."""
    hasher = blake3()
    async for piece in pieces:
        hasher.update(piece)
        yield piece
    if hasher.hexdigest() != digest:
        raise _corrupt(key, digest)
