"""Chunk locations come from indexes, else from footers. Damage there affects only the chunks in that pack."""

import asyncio
import mmap

import pytest
from blake3 import blake3

from kelvin.blobstore.blob_store import BlobStore, BlobUnavailable
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.blobstore.packs import (
    FileIndex,
    assign_offsets,
    decode_file_index,
    encode_file_index,
    encode_footer,
    file_pack,
)
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused
from tests.weightcache.kit import TENANT, make_store_tier, make_version_of, publish, publish_kept, put_pack
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.store_tier import MAX_TENANTS, StoreTier

VERSION = make_version_of([bytes([n]) * PAGE_BYTES for n in (1, 2, 3)], PAGE_BYTES)
OTHER = make_version_of([bytes([n]) * PAGE_BYTES for n in (4, 5)], PAGE_BYTES)


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, PAGE_BYTES))


async def fetch_page(tier: StoreTier, digest: str, tenant: str = TENANT) -> tuple[ReadOutcome, bytes]:
    into = page()
    return await tier.fetch(tenant, digest, into), bytes(into)


async def replace_object(store: BlobStore, key: str, data: bytes) -> None:
    await store.delete(key)
    await store.put_if_absent(key, data)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def tier(store: MemoryStore) -> StoreTier:
    return make_store_tier(store)


async def test_chunk_is_read_from_its_place_in_the_pack(store: MemoryStore, tier: StoreTier) -> None:
    """Each chunk comes from its place in its pack. Another tenant's chunk and an unknown one are absent."""
    await publish(store, VERSION)
    for digest, body in zip(VERSION.digests, VERSION.chunks, strict=True):
        assert await fetch_page(tier, digest) == (ReadOutcome.WHOLE, body)
    assert (await fetch_page(tier, OTHER.digests[0]))[0] is ReadOutcome.ABSENT
    assert (await fetch_page(tier, VERSION.digests[0], "other"))[0] is ReadOutcome.ABSENT


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(None, id="no index"),
        pytest.param(b"[]x", id="an index that does not decode"),
        pytest.param(b"", id="an empty index"),
    ],
)
async def test_footer_replaces_a_bad_index(store: MemoryStore, tier: StoreTier, index: bytes | None) -> None:
    """Without a valid index object, the pack's footer is read."""
    pack = await publish(store, VERSION)
    await store.delete(f"{TENANT}/index/{pack}")
    if index is not None:
        await store.put_if_absent(f"{TENANT}/index/{pack}", index)
    assert await fetch_page(tier, VERSION.digests[1]) == (ReadOutcome.WHOLE, VERSION.chunks[1])
    assert tier.unreadable_packs == 0


@pytest.mark.parametrize(
    "content", [pytest.param(b"", id="empty"), pytest.param(b"x" * PAGE_BYTES, id="without a footer")]
)
async def test_unreadable_pack_does_not_affect_others(store: MemoryStore, tier: StoreTier, content: bytes) -> None:
    """A pack without a valid index and footer is counted and skipped. Chunks of other packs are served."""
    pack = await publish(store, VERSION)
    await store.delete(f"{TENANT}/index/{pack}")
    await replace_object(store, f"{TENANT}/packs/{pack}", content)
    await publish(store, OTHER)
    assert await fetch_page(tier, OTHER.digests[0]) == (ReadOutcome.WHOLE, OTHER.chunks[0])
    assert (await fetch_page(tier, VERSION.digests[0]))[0] is ReadOutcome.ABSENT
    assert tier.unreadable_packs > 0


async def test_chunk_is_found_in_its_new_pack(store: MemoryStore, tier: StoreTier) -> None:
    """A chunk whose pack was collected is found in the pack that has it now. A chunk in no pack is absent."""
    pack = await publish(store, VERSION)
    await fetch_page(tier, VERSION.digests[0])
    await store.delete(f"{TENANT}/packs/{pack}")
    await put_pack(store, VERSION.chunks[:2])
    assert await fetch_page(tier, VERSION.digests[1]) == (ReadOutcome.WHOLE, VERSION.chunks[1])
    assert (await fetch_page(tier, VERSION.digests[2]))[0] is ReadOutcome.ABSENT


async def test_wrong_length_and_short_pack_are_reported(store: MemoryStore, tier: StoreTier) -> None:
    """A chunk with another length in its index, and a chunk beyond the end of its pack, are reported as such."""
    pack = await publish(store, VERSION)
    assert await tier.fetch(TENANT, VERSION.digests[0], memoryview(bytearray(2 * PAGE_BYTES))) is ReadOutcome.LENGTH
    whole = await store.read(f"{TENANT}/packs/{pack}")
    await replace_object(store, f"{TENANT}/packs/{pack}", whole[: 2 * PAGE_BYTES + 100])
    assert (await fetch_page(tier, VERSION.digests[1]))[0] is ReadOutcome.WHOLE
    assert (await fetch_page(tier, VERSION.digests[2]))[0] is ReadOutcome.SHORT


class Failing(MemoryStore):
    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        raise BlobUnavailable("down")

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        raise BlobUnavailable("down")


async def test_unavailable_store_is_retryable() -> None:
    """The failure is retryable, not a missing chunk: nothing is known about the chunk."""

    store = Failing()
    await publish(store, VERSION)
    with pytest.raises(Refused) as refused:
        await fetch_page(make_store_tier(store), VERSION.digests[0])
    assert refused.value.failure.retryable


async def test_concurrent_reads_load_each_index_once() -> None:
    """Fifty concurrent reads load the index once."""

    class Counting(MemoryStore):
        reads = 0

        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            self.reads += "/index/" in key
            await asyncio.sleep(0)
            return await super().read(key, offset, length)

    store = Counting()
    await publish(store, VERSION)
    tier = make_store_tier(store)
    await asyncio.gather(*(fetch_page(tier, VERSION.digests[n % 3]) for n in range(50)))
    assert store.reads == 1


async def test_kept_file(store: MemoryStore, tier: StoreTier) -> None:
    """Chunks of a kept file are assembled from its tensors, with zeros between them."""
    version, pack = await publish_kept(store, 7)
    for digest, body in zip(version.digests, version.chunks, strict=True):
        into = memoryview(bytearray(b"x" * len(body)))
        assert await tier.fetch(TENANT, digest, into) is ReadOutcome.WHOLE
        assert bytes(into) == body
    whole = await store.read(f"{TENANT}/packs/{pack}")
    await replace_object(store, f"{TENANT}/packs/{pack}", whole[:-100])
    into = memoryview(bytearray(len(version.chunks[0])))  # its tensors are at the end of the file
    assert await tier.fetch(TENANT, version.digests[0], into) is ReadOutcome.SHORT


async def test_kept_file_without_an_index(store: MemoryStore, tier: StoreTier) -> None:
    """Without a valid index the chunks are absent, since a kept file has no footer. A damaged index is counted."""
    version, pack = await publish_kept(store, 7)
    key = f"{TENANT}/index/{pack}"
    index = await store.read(key)
    into = memoryview(bytearray(len(version.chunks[0])))
    await store.delete(key)
    assert await tier.fetch(TENANT, version.digests[0], into) is ReadOutcome.ABSENT
    assert tier.unreadable_packs == 0
    await replace_object(store, key, index[:-1])
    assert await tier.fetch(TENANT, version.digests[0], into) is ReadOutcome.ABSENT
    assert tier.unreadable_packs > 0
    await replace_object(store, key, index)
    assert await tier.fetch(TENANT, version.digests[0], into) is ReadOutcome.WHOLE


async def test_kept_file_that_ends_like_a_pack_has_no_footer(store: MemoryStore, tier: StoreTier) -> None:
    """A kept file's last bytes are never read as a footer. The control: the same bytes as a pack."""
    digest = blake3(VERSION.chunks[0]).hexdigest()
    body = VERSION.chunks[0] + encode_footer(assign_offsets([(digest, PAGE_BYTES)]))
    pack = file_pack(blake3(body).hexdigest())
    await store.put_if_absent(f"{TENANT}/packs/{pack}", body)
    await store.put_if_absent(f"{TENANT}/index/{pack}", b"{}")
    assert (await fetch_page(tier, digest))[0] is ReadOutcome.ABSENT
    await store.put_if_absent(f"{TENANT}/packs/{blake3(body).hexdigest()}", body)
    assert await fetch_page(tier, digest) == (ReadOutcome.WHOLE, VERSION.chunks[0])


async def test_replaced_index_is_read_again(store: MemoryStore, tier: StoreTier) -> None:
    """A kept file's index that was replaced by one of another layout is read again."""
    version, pack = await publish_kept(store, 7)
    index = decode_file_index(await store.read(f"{TENANT}/index/{pack}"), pack)
    less = FileIndex(chunks=index.chunks[:1], size=index.size)
    await replace_object(store, f"{TENANT}/index/{pack}", encode_file_index(less))
    into = memoryview(bytearray(len(version.chunks[1])))
    assert await tier.fetch(TENANT, version.digests[1], into) is ReadOutcome.ABSENT
    await replace_object(store, f"{TENANT}/index/{pack}", encode_file_index(index))
    assert await tier.fetch(TENANT, version.digests[1], into) is ReadOutcome.WHOLE


async def two_packs(store: MemoryStore) -> tuple[str, str]:
    """Put the version into two packs. Return them in the order in which they are tried."""
    first, second = sorted([await put_pack(store, chunks) for chunks in (VERSION.chunks, VERSION.chunks[:2])])
    return first, second


async def test_missing_copy_is_replaced_from_another_pack(store: MemoryStore, tier: StoreTier) -> None:
    first, _ = await two_packs(store)
    await fetch_page(tier, VERSION.digests[0])
    await store.delete(f"{TENANT}/packs/{first}")
    assert await fetch_page(tier, VERSION.digests[0]) == (ReadOutcome.WHOLE, VERSION.chunks[0])


async def test_wrong_copy_is_tried_last(store: MemoryStore, tier: StoreTier) -> None:
    """A copy reported as wrong is tried after the other pack's. A chunk with only one place is read there again."""
    first, second = await two_packs(store)
    for pack, outcomes in ((first, [False, True, True]), (second, [False, True, True])):
        whole = await store.read(f"{TENANT}/packs/{pack}")
        await replace_object(store, f"{TENANT}/packs/{pack}", bytes([whole[0] ^ 1]) + whole[1:])
        for want in outcomes:
            outcome, body = await fetch_page(tier, VERSION.digests[0])
            assert outcome is ReadOutcome.WHOLE
            if (body == VERSION.chunks[0]) != want:
                raise AssertionError(pack)
            if not want:
                await tier.quarantine(TENANT, VERSION.digests[0])
        await replace_object(store, f"{TENANT}/packs/{pack}", whole)
    await tier.quarantine(TENANT, VERSION.digests[2])
    assert await fetch_page(tier, VERSION.digests[2]) == (ReadOutcome.WHOLE, VERSION.chunks[2])


class Sick(MemoryStore):
    """A store in which packs whose names contain `sick` can't be read."""

    sick = ""

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        if self.sick in key:
            raise BlobUnavailable("EIO")
        await super().read_into(key, offset, into)


async def test_unreadable_copy_is_tried_again_after_a_wrong_one() -> None:
    """A pack is unavailable for a moment, and the other copy is wrong. Then the first pack is read again."""
    store = Sick()
    first = await put_pack(store, VERSION.chunks)
    store.sick, tier = "no pack", make_store_tier(store)
    await fetch_page(tier, VERSION.digests[0])
    second = await put_pack(store, (VERSION.chunks[0], *OTHER.chunks))
    whole = await store.read(f"{TENANT}/packs/{second}")
    await replace_object(store, f"{TENANT}/packs/{second}", bytes([whole[0] ^ 1]) + whole[1:])
    store.sick = first
    assert (await fetch_page(tier, VERSION.digests[0]))[1] != VERSION.chunks[0]
    await tier.quarantine(TENANT, VERSION.digests[0])
    store.sick = "no pack"
    assert await fetch_page(tier, VERSION.digests[0]) == (ReadOutcome.WHOLE, VERSION.chunks[0])


async def test_unreadable_copy_is_replaced_from_another_pack() -> None:
    """The chunk is served if another pack has it. If no pack can be read, the read fails."""
    store = Sick()
    store.sick, _ = await two_packs(store)
    tier = make_store_tier(store)
    for _ in range(2):
        assert await fetch_page(tier, VERSION.digests[0]) == (ReadOutcome.WHOLE, VERSION.chunks[0])
    store.sick = "/packs/"
    with pytest.raises(BlobUnavailable):
        await fetch_page(tier, VERSION.digests[0])


async def test_indexes_are_read_concurrently() -> None:
    """Many indexes need few round trips, with at most 16 reads at once."""

    class Slow(MemoryStore):
        running = most = 0

        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0)
            self.running -= 1
            return await super().read(key, offset, length)

    store = Slow()
    versions = [make_version_of([bytes([n]) * PAGE_BYTES], PAGE_BYTES) for n in range(1, 60)]
    for version in versions:
        await publish(store, version)
    tier = make_store_tier(store)
    assert await fetch_page(tier, versions[-1].digests[0]) == (ReadOutcome.WHOLE, versions[-1].chunks[0])
    assert 2 < store.most <= 16


async def test_indexes_of_few_tenants_are_kept(store: MemoryStore, tier: StoreTier) -> None:
    """Only the last `MAX_TENANTS` tenants' indexes are kept. Forgotten indexes are read again."""
    await publish(store, VERSION)
    for number in range(MAX_TENANTS + 10):
        assert (await fetch_page(tier, VERSION.digests[0], f"tenant-{number}"))[0] is ReadOutcome.ABSENT
        tier.expect_version(f"tenant-{number}", VERSION.id, VERSION.digests)
    assert f"tenants={MAX_TENANTS} " in repr(tier)
    assert (await fetch_page(tier, VERSION.digests[0]))[0] is ReadOutcome.WHOLE
