"""A fresh agent reads only the indexes that a version needs, and an unreadable one affects no other version."""

import pytest

from kelvin.blobstore.blob_store import BlobUnavailable
from kelvin.blobstore.chunk_locations import encode_pack_list
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.artifacts.object_keys import pack_list_key
from tests.weightcache.kit import TENANT, Version, make_store_tier, make_version_of, publish, publish_kept, put_pack
from tests.weightcache.sources.test_store_tier import fetch_page
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.store_tier import INDEX_BATCH, MAX_EXPECTED_VERSIONS, MAX_UNAVAILABLE_PACKS, StoreTier

PACKS = 1000
VERSION = make_version_of([bytes([n]) * PAGE_BYTES for n in (1, 2)], PAGE_BYTES)


class Sick(MemoryStore):
    """A store that counts index reads, and fails reads of keys that contain one of `sick`."""

    def __init__(self) -> None:
        super().__init__()
        self.read_indexes: list[str] = []
        self.sick: tuple[str, ...] = ()

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if "/index/" in key:
            self.read_indexes.append(key.rpartition("/")[2])
        if any(sick in key for sick in self.sick):
            raise BlobUnavailable("EIO")
        return await super().read(key, offset, length)


async def store_of(packs: int = PACKS) -> tuple[Sick, str]:
    """Return a store with `packs` packs of other versions, and the version's pack."""
    store = Sick()
    for number in range(packs):
        await publish(store, make_version_of([number.to_bytes(4, "big") * (PAGE_BYTES // 4)], PAGE_BYTES))
    return store, await publish(store, VERSION)


async def check_served(tier: StoreTier, version: Version = VERSION) -> None:
    for digest, body in zip(version.digests, version.chunks, strict=True):
        into = memoryview(bytearray(len(body)))
        assert await tier.fetch(TENANT, digest, into) is ReadOutcome.WHOLE
        assert bytes(into) == body


def expecting(store: MemoryStore) -> StoreTier:
    tier = make_store_tier(store)
    tier.expect_version(TENANT, VERSION.id, VERSION.digests)
    return tier


async def test_only_the_indexes_of_the_version_are_read() -> None:
    """The pack list names one of a thousand packs, and only its index is read."""

    store, pack = await store_of()
    await store.put_if_absent(pack_list_key(TENANT, VERSION.id), encode_pack_list([pack]))
    await check_served(expecting(store))
    assert store.read_indexes == [pack]


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(None, id="none"),
        pytest.param(b"", id="an empty one"),
        pytest.param(b'["0', id="a torn one"),
        pytest.param(bytes(70), id="a zero-filled one"),
        pytest.param(b'["../x"]', id="one that names no pack"),
        pytest.param(encode_pack_list(["0" * 64, f"{'1' * 64}.tensors"]), id="one that names packs that are gone"),
    ],
)
async def test_without_a_good_list_every_index_is_read(raw: bytes | None) -> None:
    """The pack list is a hint. A version without one, or with a damaged or stale one, is served all the same."""

    store, pack = await store_of(2 * INDEX_BATCH)
    if raw is not None:
        await store.put_if_absent(pack_list_key(TENANT, VERSION.id), raw)
    await check_served(expecting(store))
    assert pack in store.read_indexes


async def test_search_ends_with_the_batch_that_has_the_chunk() -> None:
    """Without a pack list, further indexes are read only when needed, and no index is read twice."""

    store, pack = await store_of(4 * INDEX_BATCH)
    tier = make_store_tier(store)
    await check_served(tier)
    before = sorted([*(store.read_indexes)]).index(pack)
    assert len(store.read_indexes) <= before + INDEX_BATCH
    assert (await fetch_page(tier, "0" * 64))[0] is ReadOutcome.ABSENT
    assert sorted(store.read_indexes) == sorted(set(store.read_indexes))


async def test_unreadable_index_is_replaced_by_the_footer() -> None:
    """The footer of a pack has the same content. If it can't be read either, only versions in that pack fail."""

    store, pack = await store_of(INDEX_BATCH)
    store.sick = (f"/index/{pack}",)
    await check_served(make_store_tier(store))
    other = next(name for name in store.read_indexes if name != pack)
    store.sick = (f"/index/{other}", f"/packs/{other}")
    await check_served(make_store_tier(store))
    store.sick = (f"/index/{pack}", f"/packs/{pack}")
    tier = make_store_tier(store)
    with pytest.raises(BlobUnavailable):  # an unknown location is not a missing chunk
        await fetch_page(tier, VERSION.digests[0])
    store.sick = ()
    await check_served(tier)


async def test_unreadable_index_of_a_kept_file_harms_its_version_alone() -> None:
    """A kept file has no footer. Its load fails as unavailable, not as missing, until the index can be read."""

    store, _ = await store_of(1)
    kept, pack = await publish_kept(store, 7)
    store.sick = (f"/index/{pack}",)
    tier = make_store_tier(store)
    await check_served(tier)
    with pytest.raises(BlobUnavailable):
        await tier.fetch(TENANT, kept.digests[0], memoryview(bytearray(len(kept.chunks[0]))))
    store.sick = ()
    await check_served(tier, kept)


async def test_unavailable_store_is_given_up_soon() -> None:
    """A load does not try each of a thousand packs."""

    store, _ = await store_of()
    store.sick = ("/",)
    with pytest.raises(BlobUnavailable):
        await fetch_page(expecting(store), VERSION.digests[0])
    assert len(store.read_indexes) <= MAX_UNAVAILABLE_PACKS + 16


async def test_wrong_copy_is_replaced_from_an_unlisted_pack() -> None:
    """The pack list names one pack, whose copy is wrong. The indexes of all other packs are read for another copy."""

    store, pack = await store_of(INDEX_BATCH)
    await store.put_if_absent(pack_list_key(TENANT, VERSION.id), encode_pack_list([pack]))
    await put_pack(store, VERSION.chunks[:1])
    whole = await store.read(f"{TENANT}/packs/{pack}")
    await store.delete(f"{TENANT}/packs/{pack}")
    await store.put_if_absent(f"{TENANT}/packs/{pack}", bytes([whole[0] ^ 1]) + whole[1:])
    tier = expecting(store)
    assert (await fetch_page(tier, VERSION.digests[0]))[1] != VERSION.chunks[0]
    await tier.quarantine(TENANT, VERSION.digests[0])
    assert await fetch_page(tier, VERSION.digests[0]) == (ReadOutcome.WHOLE, VERSION.chunks[0])


async def test_version_forgotten_during_a_list_read_fails_no_load() -> None:
    """Two versions share a chunk. While one's list is read, the other is forgotten in favour of newer ones."""

    class Busy(Sick):
        tier: StoreTier | None = None

        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            if "/packlists/" in key and self.tier is not None:
                for number in range(MAX_EXPECTED_VERSIONS):
                    self.tier.expect_version(TENANT, f"{number:064x}", ())
            return await super().read(key, offset, length)

    store = Busy()
    await publish(store, VERSION)
    store.tier = expecting(store)
    store.tier.expect_version(TENANT, "f" * 64, VERSION.digests)
    await check_served(store.tier)
