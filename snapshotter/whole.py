"""Put a file that is kept as it is into the store: out of its staged chunks and what lies between, in its own order.

Every chunk is compared with its digest when it is first read, the whole with the file's digest at the end: bytes that
are neither are never visible under its name.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

from blake3 import blake3

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Conflict, Refused
from snapshotter.plans import PlanRecord
from snapshotter.policy.whole_file import Part, parts_of
from snapshotter.staging import Staging

_BLOCK: Final = 8 << 20
_CHUNKS_HELD: Final = 4


class WholeFileReader:
    """One pass over the file that `record` keeps. Holds a block and a few chunks in memory."""

    def __init__(self, staging: Staging, record: PlanRecord, digests: tuple[str, ...]) -> None:
        assert record.kept is not None
        self._staging = staging
        self._record = record
        self._kept = record.kept
        count = len(record.file_digests)
        self._parts = parts_of(record.chunks[count:], digests[count:], self._kept.size)
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._seen: set[str] = set()

    async def blocks(self) -> AsyncIterator[bytes]:
        """The file. Raises `Refused`: Conflict where a staged chunk was lost, ArtifactRejected where all of them make
        another file than was announced.
        """
        whole = blake3()
        block = bytearray()
        for part in self._parts:
            block += await self._read(part)
            if len(block) >= _BLOCK:
                yield await asyncio.to_thread(_absorbed, whole, block)
                block = bytearray()
        last = await asyncio.to_thread(_absorbed, whole, block)
        if whole.hexdigest() != self._kept.digest:
            rule = "its tensors and what lies between them do not make the file whose digest was sent"
            raise Refused(ArtifactRejected(self._kept.path, rule))
        yield last

    async def _read(self, part: Part) -> bytes:
        digest = part.digest or self._kept.rest
        if digest in self._seen and digest not in self._held:  # scattered tensors: not all of their chunk again
            return await asyncio.to_thread(self._staging.read_part, *self._staged(digest), part.offset, part.length)
        data = self._held.get(digest) or await self._check_in(digest)
        self._held.move_to_end(digest)
        return data[part.offset : part.offset + part.length]

    async def _check_in(self, digest: str) -> bytes:
        data = await asyncio.to_thread(self._staging.read, *self._staged(digest))
        if await asyncio.to_thread(lambda: blake3(data).hexdigest()) != digest:
            await asyncio.to_thread(self._staging.discard, self._record.tenant, digest)
            raise Refused(Conflict("commit", f"chunk {digest} was lost after it was sent: send it again"))
        self._seen.add(digest)
        self._held[digest] = data
        while len(self._held) > _CHUNKS_HELD:
            self._held.popitem(last=False)
        return data

    def _staged(self, digest: str) -> tuple[str, str, str]:
        return self._record.tenant, self._record.plan_id, digest


def _absorbed(whole: blake3, block: bytearray) -> bytes:
    whole.update(block)
    return bytes(block)
