"""Publish versions of random bytes into a file store, as a snapshotter does: packs, indices, manifests.

Arguments: directory, tenant, count, bytes of a version, bytes of a chunk, seed. Prints the digests as a line of JSON.
The versions measure how an agent moves bytes; they contain no model.
"""

import asyncio
import json
import random
import sys
from pathlib import Path

from blake3 import blake3

from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.packs import assign_offsets, encode_footer, encode_table
from kelvin.contracts.artifacts.manifest import Chunk, Engine, Limits, Manifest, Tensor, encode_manifest, version_of

PACK_CHUNKS = 16


async def publish(store: FileStore, tenant: str, chunks: list[bytes], chunk_bytes: int) -> str:
    """Publish a version and return its digest. The manifest is written last."""
    digests = [blake3(chunk).hexdigest() for chunk in chunks]
    for first in range(0, len(chunks), PACK_CHUNKS):
        part = range(first, min(first + PACK_CHUNKS, len(chunks)))
        entries = assign_offsets((digests[number], len(chunks[number])) for number in part)
        body = b"".join(chunks[number] for number in part) + encode_footer(entries)
        pack = blake3(body).hexdigest()
        await store.put_if_absent(f"{tenant}/packs/{pack}", body)
        await store.put_if_absent(f"{tenant}/index/{pack}", encode_table(entries))
    total = sum(map(len, chunks))
    manifest = Manifest(
        format=1,
        engine=Engine(1, "bench", "float32"),
        limits=Limits(16, 16),
        chunk_bytes=chunk_bytes,
        files=(),
        tensors=(Tensor("bytes", "F32", (total // 4,), 0),),
        chunks=tuple(Chunk(digest, len(chunk)) for digest, chunk in zip(digests, chunks, strict=True)),
    )
    raw = encode_manifest(manifest)
    await store.put_if_absent(f"{tenant}/manifests/{version_of(raw)}", raw)
    return version_of(raw)


async def main() -> None:
    """Publish all versions, then print their digests."""
    directory, tenant = Path(sys.argv[1]), sys.argv[2]
    count, size, chunk_bytes, seed = map(int, sys.argv[3:])
    source, store = random.Random(seed), FileStore(directory)  # noqa: S311 - no secret
    found = []
    for _ in range(count):
        chunks = [source.randbytes(min(chunk_bytes, size - at)) for at in range(0, size, chunk_bytes)]
        found.append(await publish(store, tenant, chunks, chunk_bytes))
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
