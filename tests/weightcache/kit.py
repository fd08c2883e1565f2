"""Versions made from a seed, their store, an open cache over it (`open_test_cache`), and an agent in a thread
(`run_agent`).

`peer_kit.py` has agents that are peers, `processes.py` agents as processes.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TypeVar

from blake3 import blake3

from kelvin.blobstore.blob_store import BlobStat, BlobStore
from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.packs import (
    FileChunk,
    FileIndex,
    FileSpan,
    assign_offsets,
    encode_file_index,
    encode_footer,
    encode_table,
    file_pack,
)
from kelvin.contracts.artifacts.manifest import (
    PAGE_BYTES,
    Chunk,
    Engine,
    Limits,
    Manifest,
    PinnedFile,
    Tensor,
    decode_manifest,
    encode_manifest,
    version_of,
)
from kelvin.contracts.artifacts.runtime_control import Fingerprint, GateFacts, Probe, SealAttestation
from kelvin.contracts.wire import encode
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from tests.eventually import PATIENCE_S
from tests.loop_thread import running_loop_thread
from weightcache.app.api import State
from weightcache.app.app import HTTP_SOCKET, serve
from weightcache.app.cache import Cache, open_cache
from weightcache.app.settings import LOCAL_READS, CacheSettings
from weightcache.client.lease import Lease, acquire
from weightcache.counters import Counters
from weightcache.sources.policy.bdp_window import BdpWindow
from weightcache.sources.policy.read_hedging import HedgeRule, ReadHedging
from weightcache.sources.source import Verify, is_digest_of
from weightcache.sources.store_ranges import StoreRanges
from weightcache.sources.store_tier import StoreTier

TENANT = "acme"
HUGE = 2 << 20
TIMEOUT_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True)
class Version:
    """A manifest and its bytes."""

    raw: bytes
    manifest: Manifest
    chunks: tuple[bytes, ...]

    @property
    def id(self) -> str:
        return version_of(self.raw)

    @cached_property
    def linear(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(chunk.digest for chunk in self.manifest.chunks)


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % PAGE_BYTES)


def make_version(
    seed: int = 0, pages: Sequence[int] = (1, 16, 3), chunk_pages: int = 4, files: Sequence[int] = (100,)
) -> Version:
    """Make a version of pinned files of these sizes and one float32 tensor per entry of `pages`.

    A chunk ends where a file or tensor ends.
    """
    source = random.Random(seed)
    sections: list[bytes] = []
    pinned: list[PinnedFile] = []
    tensors: list[Tensor] = []
    offset = 0
    for number, size in enumerate(files):
        data = source.randbytes(size)
        pinned.append(PinnedFile(f"file{number}", offset, size, blake3(data).hexdigest()))
        sections.append(pad(data))
        offset += len(sections[-1])
    for number, count in enumerate(pages):
        data = source.randbytes(count * PAGE_BYTES)
        tensors.append(Tensor(f"tensor{number}", "F32", (count, PAGE_BYTES // 4), offset))
        sections.append(data)
        offset += len(data)
    step = chunk_pages * PAGE_BYTES
    chunks = tuple(body[at : at + step] for body in sections for at in range(0, len(body), step))
    return make_version_of(chunks, step, pinned, tensors)


def make_version_of(
    chunks: Sequence[bytes], chunk_bytes: int, files: Sequence[PinnedFile] = (), tensors: Sequence[Tensor] = ()
) -> Version:
    manifest = Manifest(
        format=1,
        engine=Engine(1, "test", "float32"),
        limits=Limits(16, 16),
        chunk_bytes=chunk_bytes,
        files=tuple(files),
        tensors=tuple(tensors),
        chunks=tuple(Chunk(blake3(chunk).hexdigest(), len(chunk)) for chunk in chunks),
    )
    raw = encode_manifest(manifest)
    assert decode_manifest(raw, version_of(raw)) == manifest
    return Version(raw, manifest, tuple(chunks))


def make_pack(chunks: Sequence[bytes]) -> tuple[str, bytes, bytes]:
    """Return digest, bytes and index object of a pack of distinct chunks."""
    distinct = {blake3(chunk).hexdigest(): chunk for chunk in chunks}
    entries = assign_offsets((digest, len(chunk)) for digest, chunk in distinct.items())
    body = b"".join(distinct.values()) + encode_footer(entries)
    return blake3(body).hexdigest(), body, encode_table(entries)


async def put_pack(store: BlobStore, chunks: Sequence[bytes], tenant: str = TENANT) -> str:
    """Put a pack of these chunks, and its index. Return its digest."""
    digest, body, table = make_pack(chunks)
    await store.put_if_absent(f"{tenant}/packs/{digest}", body)
    await store.put_if_absent(f"{tenant}/index/{digest}", table)
    return digest


async def publish(store: BlobStore, version: Version, tenant: str = TENANT, *, draft: bool = False) -> str:
    """Put the version's pack, index and manifest. Return the pack's digest."""
    digest = await put_pack(store, version.chunks, tenant)
    await store.put_if_absent(f"{tenant}/{'drafts' if draft else 'manifests'}/{version.id}", version.raw)
    return digest


async def publish_kept(
    store: BlobStore, seed: int, tensors: Sequence[int] = (100, 5000, 9000, 7), attested: bool = False
) -> tuple[Version, str]:
    """Put a version whose weights are in a kept file. Return the version, and the file's name as a pack.

    Each chunk holds two of the tensors of these sizes. The file has the tensors in reverse order, each after a header.
    """
    source = random.Random(seed)
    datas = [source.randbytes(size) for size in tensors]
    body, offsets = b"|TZR|" + source.randbytes(300), {}
    for number in reversed(range(len(datas))):
        body += source.randbytes(61)
        offsets[number] = len(body)
        body += datas[number]
    body += bytes(8)
    pairs = [range(at, min(at + 2, len(datas))) for at in range(0, len(datas), 2)]
    parts = [b"".join(pad(datas[number]) for number in pair) for pair in pairs]
    version = make_version_of(parts, max(len(part) for part in parts))
    chunks = (
        FileChunk(digest, tuple(FileSpan(offsets[number], len(datas[number])) for number in pair))
        for digest, pair in zip(version.digests, pairs, strict=True)
    )
    pack = file_pack(blake3(body).hexdigest())
    await store.put_if_absent(f"{TENANT}/packs/{pack}", body)
    index = FileIndex(chunks=tuple(chunks), size=len(body))
    await store.put_if_absent(f"{TENANT}/index/{pack}", encode_file_index(index))
    await store.put_if_absent(f"{TENANT}/manifests/{version.id}", version.raw)
    if attested:
        await attest(store, version.id)
    return version, pack


def attestation_of(version: str) -> SealAttestation:
    return SealAttestation(
        version=version,
        fingerprint=Fingerprint(torch="2", dtype="float32", device_class="cpu-1"),
        threads=1,
        fast_bind=True,
        probe=Probe(token_ids=(1, 2), top_ids=((1,),), top_logits=((0.5,),), tolerance=0.1),
        gate=GateFacts(
            architecture="test", dtype="float32", layers=1, kv_heads=1, head_dim=1, value_dim=1, vocab_size=2,
            max_positions=1, kv_bytes_per_token=1, first_use=("a",),
        ),
    )  # fmt: skip


async def attest(store: BlobStore, version: str, tenant: str = TENANT, mark: str = "0" * 16) -> None:
    await store.put_if_absent(f"{tenant}/attestations/{version}/seal-{mark}", encode(attestation_of(version)))


def settings_of(data: Path, *, slabs: int = 8, slab_bytes: int = HUGE, nvme_bytes: int = 1 << 30) -> CacheSettings:
    return CacheSettings(
        data=data,
        store_url=(data / "store").as_uri(),
        host_bytes=slabs * slab_bytes,
        slab_bytes=slab_bytes,
        nvme_bytes=nvme_bytes,
    )


def make_store_tier(store: BlobStore) -> StoreTier:
    """Return a store tier over the store, without hedged reads."""
    return StoreTier(store, StoreRanges(store, ReadHedging(HedgeRule(share=0.0)), BdpWindow(LOCAL_READS), Counters()))


class CountingStore:
    """A store that records the ranges read from it. Reads wait while `gate` is cleared."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner
        self.ranges: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()

    async def put_if_absent(self, key: str, data: bytes | AsyncIterator[bytes]) -> bool:
        return await self.inner.put_if_absent(key, data)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return await self.inner.read(key, offset, length)

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        self.ranges.append((key, offset))
        assert await asyncio.to_thread(self.gate.wait, TIMEOUT_S)
        await self.inner.read_into(key, offset, into)

    async def stat(self, key: str) -> BlobStat:
        return await self.inner.stat(key)

    def list(self, prefix: str) -> AsyncIterator[str]:
        return self.inner.list(prefix)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)


class HeldStore(CountingStore):
    """A store in which reads at offset `half` or later wait until `gate` is set."""

    def __init__(self, inner: BlobStore, half: int) -> None:
        super().__init__(inner)
        self.half = half
        self.gate.clear()

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        if offset >= self.half:
            await super().read_into(key, offset, into)
        else:
            await self.inner.read_into(key, offset, into)


@dataclass(frozen=True)
class RunningAgent:
    """An agent in a thread of this process, composed as in the product."""

    settings: CacheSettings
    directory: SocketDirectory
    store: BlobStore

    def acquire(
        self, version: Version | str, tenant: str = TENANT, timeout_s: float = TIMEOUT_S, *, progressive: bool = False
    ) -> Lease:
        name = version if isinstance(version, str) else version.id
        return acquire(self.directory, tenant, name, timeout_s, progressive=progressive)

    def publish(self, version: Version, tenant: str = TENANT, *, draft: bool = False) -> str:
        return asyncio.run(publish(self.store, version, tenant, draft=draft))

    def keep(self, *versions: Version) -> State:
        """Publish versions and lease each once. On return, NVMe holds exactly their chunks."""
        for version in versions:
            self.publish(version)
            self.acquire(version).close()
        count = len({digest for version in versions for digest in version.digests})
        return self.wait_for("all chunks are on NVMe", lambda state: state.nvme.chunks == count)

    def prefetch(
        self, version: Version | str, tier: str = "host", *, urgent: bool = False, tenant: str = TENANT
    ) -> None:
        """Ask for a prefetch. It has begun on return."""
        name = version if isinstance(version, str) else version.id
        self.ask("POST", "/v1/prefetch", NoneType, {"tenant": tenant, "version": name, "tier": tier, "urgent": urgent})

    def ask(self, method: str, path: str, answer: type[T], body: object = None) -> T:
        return asyncio.run(call_agent(self.directory, method, path, answer, body))

    def state(self) -> State:
        return asyncio.run(read_state(self.directory))

    def evict(self, tier: str, tenant: str | None = None, version: str | None = None) -> None:
        asyncio.run(evict(self.directory, tier, tenant, version))

    def wait_for(self, wish: str, condition: Callable[[State], bool]) -> State:
        return asyncio.run(wait_for(self.directory, wish, condition))

    def chunk_file(self, digest: str, tenant: str = TENANT) -> Path:
        return self.settings.cache / tenant / digest[:2] / digest


async def call_agent(directory: SocketDirectory, method: str, path: str, answer: type[T], body: object = None) -> T:
    """Make one call to an agent's HTTP socket."""
    client = ServiceClient(directory, HTTP_SOCKET, "the weight cache")
    try:
        return await client.call(method, path, answer, body=body, timeout_s=TIMEOUT_S)
    finally:
        await client.close()


async def read_state(directory: SocketDirectory) -> State:
    return await call_agent(directory, "GET", "/v1/state", State)


async def evict(directory: SocketDirectory, tier: str, tenant: str | None, version: str | None) -> None:
    await call_agent(directory, "POST", "/v1/evict", NoneType, {"tier": tier, "tenant": tenant, "version": version})


async def wait_for(directory: SocketDirectory, wish: str, condition: Callable[[State], bool]) -> State:
    """Poll the state until the condition holds. Fails after `TIMEOUT_S`."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(state := await read_state(directory)):
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never came true: {wish}; {state}") from None
    return state


@asynccontextmanager
async def open_test_cache(
    settings: CacheSettings, *versions: Version, store: BlobStore | None = None, verify: Verify = is_digest_of
) -> AsyncIterator[Cache]:
    """Open a cache over `store` (default: the file store in its data directory).

    It has these versions in memory, and on NVMe if they fit there.
    """
    store = store or FileStore(settings.data / "store")
    async with open_cache(settings, store, verify=verify) as cache:
        for version in versions:
            await publish(store, version)
            await cache.version_loader.load(TENANT, version.id, TIMEOUT_S, urgent=False)
        await cache.loader.wait_until_idle()
        yield cache


@contextmanager
def run_agent(
    settings: CacheSettings, store: BlobStore | None = None, *, verify: Verify = is_digest_of
) -> Iterator[RunningAgent]:
    """Run an agent over `store` (default: the file store in its data directory) until the block ends."""
    store = store or FileStore(settings.data / "store")
    directory = SocketDirectory(settings.run)
    try:
        with running_loop_thread(lambda stop: serve(settings, store, stop, verify=verify), quick=True) as thread:
            asyncio.run(until_ready(directory, thread.is_alive))
            yield RunningAgent(settings, directory, store)
    finally:
        directory.close()


async def until_ready(directory: SocketDirectory, is_alive: Callable[[], bool]) -> None:
    """Wait until the agent at `directory` is ready, or `is_alive` returns False."""
    async with asyncio.timeout(PATIENCE_S):
        while is_alive():
            client = ServiceClient(directory, HTTP_SOCKET, "the weight cache")
            try:
                async with client.open("GET", "/readyz", timeout_s=TIMEOUT_S):
                    return
            except Exception:
                await asyncio.sleep(0.005)
            finally:
                await client.close()


async def run_tasks() -> None:
    """Let every task run until it waits for something other than a task."""
    for _ in range(10):
        await asyncio.sleep(0)
