"""A version whose weights are in a kept tensorizer file is restored with the same bytes, all of them verified.

Uses the product's cache over a file store and over S3. Each byte of the file belongs to a class: a tensor, a header,
padding of the index, or the end. A damaged byte that a chunk needs is healed from a copy or refused by name.
"""

from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BlobStore
from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.packs import FileIndex, decode_file_index
from kelvin.blobstore.store_factory import open_checked_store
from kelvin.contracts.errors import Refused
from tests.faults.s3_buckets import ENVIRONMENT, Buckets
from tests.weightcache.kit import TENANT, Version, open_test_cache, publish_kept, put_pack, settings_of
from weightcache.app.cache import Cache
from weightcache.sources.source import Verify, is_digest_of

TIMEOUT_S = 60.0
SIZES = (100, 5000, 30_000, 7, 12_288, 1)


async def read_leased(cache: Cache, version: Version) -> bytes | str:
    """Return the version's linear space from the host tier, or the code of the refusal."""
    try:
        async with cache.version_loader.pin_version(TENANT, version.id, TIMEOUT_S) as arrival:
            space = bytearray()
            chunks = [(chunk.digest, chunk.length) for chunk in version.manifest.chunks]
            reservation = cache.arena.reserve(TENANT, chunks, 0.0)
            try:
                for digest in version.digests:
                    space += await cache.arena.view(reservation.places[digest])
            finally:
                cache.arena.unpin(reservation.slabs)
            assert arrival.resident.engines
            return bytes(space)
    except Refused as refused:
        return refused.failure.code


async def from_scratch(root: Path, store: BlobStore, version: Version, verify: Verify = is_digest_of) -> bytes | str:
    """Restore with nothing above the store."""
    async with open_test_cache(settings_of(root, slabs=4), store=store, verify=verify) as cache:
        await cache.evict("nvme", None, None)
        return await read_leased(cache, version)


async def test_kept_file_gives_the_same_bytes(tmp_path: Path) -> None:
    """The version is restored from the file, then from NVMe without the file."""

    store = FileStore(tmp_path / "store")
    version, pack = await publish_kept(store, 1, SIZES, attested=True)
    async with open_test_cache(settings_of(tmp_path, slabs=4), store=store) as cache:
        assert await read_leased(cache, version) == version.linear
        await cache.loader.wait_until_idle()
        assert cache.counters.admitted_chunks == len(version.chunks)
        await cache.evict("host", None, None)
        await store.delete(f"{TENANT}/packs/{pack}")
        assert await read_leased(cache, version) == version.linear


def classes(index: FileIndex) -> dict[str, tuple[int, bool]]:
    """Return an offset of each class of bytes of the file, and whether a chunk needs it."""
    found = {"the header": (3, False), "the index": (100, False), "the end": (index.size - 1, False)}
    for number, chunk in enumerate(index.chunks):
        for part, span in enumerate(chunk.spans):
            found[f"the first byte of tensor {number}.{part}"] = (span.offset, True)
            found[f"the last byte of tensor {number}.{part}"] = (span.offset + span.length - 1, True)
            found[f"the header of tensor {number}.{part}"] = (span.offset - 1, False)
    return found


def damage(path: Path, at: int, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "flip":
        raw[at] ^= 1
    elif how == "cut":
        raw = raw[:at]
    else:
        raw[at : at + 1] = b""  # shifts all later bytes by one
    path.chmod(0o600)
    path.write_bytes(raw)


@pytest.mark.deep
@pytest.mark.parametrize("copied", [pytest.param(False, id="alone"), pytest.param(True, id="beside a pack")])
@pytest.mark.parametrize("how", ["flip", "cut", "shift"])
async def test_damaged_byte_of_any_class_is_never_served(tmp_path: Path, how: str, copied: bool) -> None:
    """Damaged chunks are refused as corrupt, or healed from a pack with the same chunks."""

    store = FileStore(tmp_path / "store")
    version, pack = await publish_kept(store, 2, SIZES, attested=True)
    path = tmp_path / "store" / TENANT / "packs" / pack
    index = decode_file_index(await store.read(f"{TENANT}/index/{pack}"), pack)
    if copied:
        await put_pack(store, version.chunks)
    whole = path.read_bytes()
    for name, (at, is_needed) in classes(index).items():
        damage(path, at, how)
        hit = is_needed if how == "flip" else at <= max(s.offset + s.length - 1 for c in index.chunks for s in c.spans)
        want = version.linear if copied or not hit else "chunk_corrupt"
        assert await from_scratch(tmp_path, store, version) == want, name
        path.write_bytes(whole)
    assert await from_scratch(tmp_path, store, version) == version.linear


async def test_without_verification_they_would_be(tmp_path: Path) -> None:
    """The control: the same damage, unverified, reaches the weights."""

    store = FileStore(tmp_path / "store")
    version, pack = await publish_kept(store, 2, SIZES, attested=True)
    index = decode_file_index(await store.read(f"{TENANT}/index/{pack}"), pack)
    damage(tmp_path / "store" / TENANT / "packs" / pack, index.chunks[0].spans[1].offset, "flip")
    found = await from_scratch(tmp_path, store, version, verify=lambda data, digest: True)
    assert isinstance(found, bytes)
    assert len(found) == len(version.linear)
    assert found != version.linear


async def test_wrong_index_is_refused(tmp_path: Path) -> None:
    """A wrong offset in the index is refused by digest. An index that is torn, lost or another's misses chunks."""

    store = FileStore(tmp_path / "store")
    version, pack = await publish_kept(store, 3, SIZES, attested=True)
    path = tmp_path / "store" / TENANT / "index" / pack
    raw = path.read_bytes()
    offset = decode_file_index(raw, pack).chunks[0].spans[0].offset
    for wrong, want in (
        (raw.replace(b"[%d," % offset, b"[%d," % (offset - 1)), "chunk_corrupt"),
        (raw.replace(version.digests[0].encode(), b"0" * 64), "chunk_missing"),
        (raw[:-1], "chunk_missing"),
        (None, "chunk_missing"),
    ):
        path.unlink()
        if wrong is not None:
            assert wrong != raw
            path.write_bytes(wrong)
        assert await from_scratch(tmp_path, store, version) == want
        path.write_bytes(raw)
    assert await from_scratch(tmp_path, store, version) == version.linear


@pytest.fixture
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.deep
@pytest.mark.usefixtures("_credentials")
async def test_s3(tmp_path: Path, buckets: Buckets) -> None:
    """Ranged GETs give the same bytes. A flipped byte is refused by its digest, and the right file is served again."""
    bucket = buckets.make()

    async with open_checked_store(buckets.url(bucket, "p"), writes=True) as store:
        version, pack = await publish_kept(store, 4, SIZES, attested=True)
        assert await from_scratch(tmp_path, store, version) == version.linear
        key = f"{TENANT}/packs/{pack}"
        whole = await store.read(key)
        at = decode_file_index(await store.read(f"{TENANT}/index/{pack}"), pack).chunks[-1].spans[0].offset
        for body, want in (
            (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "chunk_corrupt"),
            (whole[: at + 1], "chunk_corrupt"),
            (whole, version.linear),
        ):
            await store.delete(key)
            await store.put_if_absent(key, body)
            assert await from_scratch(tmp_path, store, version) == want
