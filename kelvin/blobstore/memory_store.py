"""A store in this process's memory, for tests and experiments. Its content ends with the process."""

import time
from collections.abc import AsyncIterator, Callable

from kelvin.blobstore.blob_store import BlobNotFound, BlobStat, Payload, check_key, check_prefix, check_range


class MemoryStore:
    """A store in memory. Instances share nothing."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._blobs: dict[str, bytes] = {}
        self._put_at_s: dict[str, float] = {}
        self._clock = clock

    def __repr__(self) -> str:
        return f"<MemoryStore objects={len(self._blobs)}>"

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        check_key(key)
        if key in self._blobs:
            return False
        whole = data if isinstance(data, bytes) else b"".join([piece async for piece in data])
        if key in self._blobs:
            return False  # another put was faster
        self._blobs[key], self._put_at_s[key] = whole, self._clock()
        return True

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        blob = self._get(key)
        return blob[offset : offset + check_range(key, len(blob), offset, length)]

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        into[:] = await self.read(key, offset, into.nbytes)

    async def stat(self, key: str) -> BlobStat:
        return BlobStat(len(self._get(key)), self._put_at_s[key])

    async def list(self, prefix: str) -> AsyncIterator[str]:
        check_prefix(prefix)
        for key in sorted(self._blobs):
            if key.startswith(prefix):
                yield key

    async def delete(self, key: str) -> None:
        self._blobs.pop(check_key(key), None)

    def _get(self, key: str) -> bytes:
        try:
            return self._blobs[check_key(key)]
        except KeyError:
            raise BlobNotFound(key) from None
