"""A collection frees only objects that nothing needs, whatever is damaged, missing or foreign in the store."""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kelvin.blobstore.blob_store import BlobUnavailable
from kelvin.blobstore.packs import decode_footer, encode_footer
from kelvin.contracts.artifact_errors import ManifestCorrupt, ManifestMissing
from kelvin.contracts.artifacts.attestation import ORIGIN_TYPE, Claims, OriginPredicate
from kelvin.contracts.artifacts.push_api import AttestRequest, CollectReport
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.crypto.signing_keys import Signer
from snapshotter.maintenance.collector import MAX_COLLECTIONS, Collector
from snapshotter.push.staging import IDLE_S
from tests.snapshotter.bench import Bench, push
from tests.snapshotter.maintenance.test_fsck import check
from tests.snapshotter.models import Model, default_weights
from tests.snapshotter.reader import read_version
from tests.snapshotter.sender import TENANT, commit, open_push, send
from tests.snapshotter.tensors_files import KeptModel

PLAIN, KEPT = Model(), KeptModel(shards={"model.safetensors": default_weights(seed=70)})
PUBLISHER = Signer(Ed25519PrivateKey.generate())
DELETED = Model(shards={"model.safetensors": default_weights(seed=140)})
FOREIGN_KEYS = [
    pytest.param(f"{TENANT}/{kind}/{name}", id=f"{what} in {kind}")
    for kind in ("packs", "index", "manifests", "drafts", "attestations", "inputs", "condemned", "packlists")
    for what, name in (
        ("a stray file", "README"),
        ("four segments", "a/b"),
        ("five segments", f"{'0' * 64}/b/c"),
        ("an object of another format", f"{'0' * 64}.v2"),
    )
] + [
    pytest.param(f"{TENANT}/README", id="a stray file beside the kinds"),
    pytest.param(f"{TENANT}/other/a/b", id="another kind"),
    pytest.param("README", id="a stray file beside the tenants"),
    pytest.param("lost+found/a", id="the file system's own directory"),
    pytest.param(f"{TENANT}/packs/lost+found/a", id="the file system's own directory in packs"),
]


def collect(bench: Bench, run: bool = True) -> CollectReport:
    return asyncio.run(bench.collector.collect(TENANT, run=run))


def store_of(tmp_path: Path) -> tuple[Bench, tuple[str, ...], str]:
    """Return a store with a version in packs, one in a kept file, and one that no model names, and their ids."""
    bench = Bench.over(tmp_path)
    *named, deleted = (push(bench, model).version for model in (PLAIN, KEPT, DELETED))
    assert bench.jobs.registered is not None
    bench.jobs.registered = [each for each in bench.jobs.registered if each.version != deleted]
    return bench, tuple(named), deleted


def objects(tmp_path: Path) -> dict[str, bytes]:
    root = tmp_path / "store"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def check_whole(tmp_path: Path, versions: tuple[str, ...]) -> None:
    for version in versions:
        read_version(tmp_path / "store", TENANT, version)


def test_unnamed_version_is_collected(tmp_path: Path) -> None:
    """The control: all objects that only the deleted version needs are freed, and the named versions stay whole."""
    bench, named, deleted = store_of(tmp_path)
    report = collect(bench)
    assert f"{TENANT}/manifests/{deleted}" in [freed.key for freed in report.freed]
    assert any("/packs/" in freed.key for freed in report.freed)
    check_whole(tmp_path, named)


def test_repeated_push_restarts_the_grace_period(tmp_path: Path) -> None:
    """A push ends the version's mark of an earlier collection, so its grace period begins again."""
    bench, now_s = Bench.over(tmp_path), [time.time()]
    collector = Collector(
        bench.store, bench.pushes._publisher, bench.pushes._staging, bench.jobs, 100.0, lambda: now_s[0]
    )
    version = push(bench, PLAIN).version
    bench.jobs.registered = []
    assert [each.version for each in asyncio.run(collector.collect(TENANT, run=True)).condemned] == [version]
    assert push(bench, PLAIN).version == version
    bench.jobs.registered = []
    now_s[0] += 1000
    assert [each.version for each in asyncio.run(collector.collect(TENANT, run=True)).condemned] == [version]
    check_whole(tmp_path, (version,))


def test_collection_killed_midway_leaves_no_fault(tmp_path: Path) -> None:
    """The check reports no fault after any object was freed, only leftovers, which the next collection frees."""
    bench, named, deleted = store_of(tmp_path)
    # the mark of the collection that found the version unnamed
    mark = tmp_path / "store" / TENANT / "condemned" / deleted
    mark.parent.mkdir()
    mark.touch()
    freed = [each.key for each in collect(bench, run=False).freed]
    kinds = {"inputs", "manifests", "attestations", "packlists", "condemned", "index", "packs"}
    assert {key.split("/")[1] for key in freed} == kinds
    leftovers = []
    for key in freed:
        findings, summary = check(tmp_path, named=named)
        assert findings == [], f"before {key}"
        leftovers.append(summary.leftovers)
        (tmp_path / "store" / key).unlink()
    assert leftovers[0] == 0
    assert max(leftovers) > 0
    findings, summary = check(tmp_path, named=named)
    assert (findings, summary.leftovers) == ([], 0)
    assert collect(bench).freed == ()


def test_unindexed_pack_is_a_fault_while_it_may_be_needed(tmp_path: Path) -> None:
    """The version's manifest does not decode, so any chunk may be needed."""
    bench, named, deleted = store_of(tmp_path)
    freed = [each.key for each in collect(bench, run=False).freed]
    index = next(key for key in freed if "/index/" in key)
    (tmp_path / "store" / TENANT / "manifests" / deleted).write_bytes(b"{}")
    (tmp_path / "store" / index).unlink()
    findings, summary = check(tmp_path, named=named)
    assert index in [finding.key for finding in findings]
    assert summary.leftovers == 0


def test_unindexed_pack_that_stays_is_a_fault(tmp_path: Path) -> None:
    """A version needs a chunk of the pack. A collection frees no such pack, even if another one has the chunk."""
    bench, named, _ = store_of(tmp_path)
    collect(bench)
    packs = tmp_path / "store" / TENANT / "packs"
    whole = next(path for path in packs.iterdir() if not path.suffix).read_bytes()
    first = decode_footer(whole, len(whole), "")[0]
    raw = whole[: first.length] + encode_footer([first])
    pack = packs / blake3(raw).hexdigest()
    pack.write_bytes(raw)
    findings, summary = check(tmp_path, named=named)
    assert collect(bench).freed == ()
    assert [finding.key for finding in findings] == [f"{TENANT}/index/{pack.name}"]
    assert summary.leftovers == 0


def test_kept_file_without_its_index_stays(tmp_path: Path) -> None:
    """The check advises to delete a damaged index of a kept file. The file stays, and the next push repairs it."""
    bench, named, _ = store_of(tmp_path)
    (index,) = (tmp_path / "store" / TENANT / "index").glob("*.tensors")
    kept = tmp_path / "store" / TENANT / "packs" / index.name
    index.unlink()
    assert collect(bench).lost  # the report says why no pack is freed
    assert kept.exists()
    push(bench, KEPT)
    assert not collect(bench).lost
    check_whole(tmp_path, named)


def test_kept_file_that_no_version_needs_goes(tmp_path: Path) -> None:
    """The control: the remains of a killed push of a kept file are freed, because all chunks are elsewhere."""
    bench, named, _ = store_of(tmp_path)
    stray = tmp_path / "store" / TENANT / "packs" / f"{'0' * 64}.tensors"
    stray.write_bytes(b"a file whose push was killed before its index")
    assert f"{TENANT}/packs/{stray.name}" in [freed.key for freed in collect(bench).freed]
    check_whole(tmp_path, named)


@pytest.mark.parametrize("stranger", FOREIGN_KEYS)
def test_foreign_object_stops_nothing(tmp_path: Path, stranger: str) -> None:
    """A collection leaves it alone and frees the rest, pushes work, and a check names it if it is in the format."""
    bench, named, deleted = store_of(tmp_path)
    path = tmp_path / "store" / stranger
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"not ours")
    assert f"{TENANT}/manifests/{deleted}" in [freed.key for freed in collect(bench).freed]
    assert path.read_bytes() == b"not ours"
    assert not push(Bench.over(tmp_path), PLAIN).created
    findings, _ = check(tmp_path, named=named)
    in_format = stranger.startswith(f"{TENANT}/") and "lost+found" not in stranger
    assert [finding.key for finding in findings] == ([stranger] if in_format else [])
    check_whole(tmp_path, named)


def test_object_that_cannot_be_read_stops_no_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreadable inputs may belong to any version, so they stay. Objects that nothing needs are freed."""
    bench, named, deleted = store_of(tmp_path)
    (unreadable,) = [key for key, raw in objects(tmp_path).items() if "/inputs/" in key and raw == deleted.encode()]
    read = bench.store.read

    async def read_but_one(key: str, offset: int = 0, length: int | None = None) -> bytes:
        if key == unreadable:
            raise BlobUnavailable("EIO")
        return await read(key, offset, length)

    monkeypatch.setattr(bench.store, "read", read_but_one)
    for _ in range(2):  # the first one condemns
        collect(bench)
    assert [key for key in objects(tmp_path) if deleted in key] == []
    assert unreadable in objects(tmp_path)
    check_whole(tmp_path, named)


def test_pack_deleted_meanwhile_stops_no_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack without an index is deleted between the listing and the read of its footer."""
    bench, named, _ = store_of(tmp_path)
    index = min(path for path in (tmp_path / "store" / TENANT / "index").iterdir() if not path.suffix)
    pack = tmp_path / "store" / TENANT / "packs" / index.name
    right = index.read_bytes(), pack.read_bytes()
    index.unlink()
    read = bench.store.read

    async def read_after(key: str, offset: int = 0, length: int | None = None) -> bytes:
        if key.endswith(f"/index/{index.name}"):
            pack.unlink(missing_ok=True)
        return await read(key, offset, length)

    monkeypatch.setattr(bench.store, "read", read_after)
    collect(bench)
    index.write_bytes(right[0])
    pack.write_bytes(right[1])
    check_whole(tmp_path, named)


DAMAGES = {"missing": None, "empty": 0.0, "torn": 0.5, "zero-filled": 1.0}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["packs", "index", "manifests", "attestations", "inputs", "packlists"])
@pytest.mark.parametrize("of_kept_file", [False, True], ids=["plain", "kept file"])
def test_damage_frees_nothing_that_a_version_needs(tmp_path: Path, kind: str, damage: str, of_kept_file: bool) -> None:
    """After the damage is undone, every named version is whole. A bad manifest refuses the collection by name."""
    bench, named, _ = store_of(tmp_path)
    files = sorted((tmp_path / "store" / TENANT / kind).rglob("*"))
    if kind in ("packs", "index"):
        chosen = [path for path in files if (path.suffix == ".tensors") is of_kept_file]
    else:
        version = named[of_kept_file]
        chosen = [
            path for path in files if path.is_file() and version in (*path.parts, path.read_text(errors="replace"))
        ]
    share, rights = DAMAGES[damage], {path: path.read_bytes() for path in chosen}
    assert rights
    for path, right in rights.items():
        if share is None:
            path.unlink()
        else:
            path.write_bytes(right[: int(len(right) * share)] if share < 1 else bytes(len(right)))
    if kind == "manifests":
        with pytest.raises(Refused) as refused:
            collect(bench)
        assert isinstance(refused.value.failure, ManifestMissing if share is None else ManifestCorrupt)
    else:
        collect(bench)
    for path, right in rights.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(right)
    check_whole(tmp_path, named)


def test_waiting_collection_does_not_block_other_tenants(tmp_path: Path) -> None:
    """A collection waits while a push of its tenant writes packs. Collections are bounded per tenant and in all."""
    bench, _, _ = store_of(tmp_path)
    publisher = bench.pushes._publisher

    async def refused(tenant: str) -> Overloaded:
        with pytest.raises(Refused) as refused:
            await bench.collector.collect(tenant, run=False)
        assert isinstance(refused.value.failure, Overloaded)
        return refused.value.failure

    async def main() -> None:
        async with AsyncExitStack() as pushes, asyncio.TaskGroup() as collections:
            for number in range(MAX_COLLECTIONS):
                await pushes.enter_async_context(publisher.hold_packs(f"tenant-{number}"))
            for number in range(MAX_COLLECTIONS - 1):
                collections.create_task(bench.collector.collect(f"tenant-{number}", run=False))
            await asyncio.sleep(0)
            assert bench.collector.is_running("tenant-0")
            assert (await refused("tenant-0")).limit == 1
            assert not (await bench.collector.collect(TENANT, run=False)).ran
            collections.create_task(bench.collector.collect(f"tenant-{MAX_COLLECTIONS - 1}", run=False))
            await asyncio.sleep(0)
            assert (await refused(TENANT)).limit == MAX_COLLECTIONS
            await pushes.aclose()
        assert not bench.collector.is_running("tenant-0")

    asyncio.run(main())


async def test_active_push_is_kept_without_a_grace_period(tmp_path: Path) -> None:
    """An operator may collect without a grace period. Active pushes are kept all the same, and idle ones dropped."""
    bench, model = Bench.over(tmp_path), Model()
    sent = await open_push(bench.pushes, model.files(), model.request())
    await send(bench.pushes, sent)
    assert (await bench.collector.collect(TENANT, run=True)).dropped_pushes == 0
    await commit(bench.pushes, sent)
    directory = tmp_path / "staging" / TENANT / (await open_push(bench.pushes, model.files(), model.request())).push_id
    os.utime(directory, (time.time() - 2 * IDLE_S,) * 2)
    assert (await bench.collector.collect(TENANT, run=True)).dropped_pushes == 1
    assert not directory.exists()


@pytest.mark.parametrize("age_s", [0.0, 200.0])
def test_statement_of_an_open_push_stays(tmp_path: Path, age_s: float) -> None:
    """A deleted version is pushed again with a publisher's statement, which may be the same as before.

    A collection between the statement and the commit frees the old version, and keeps the statement.
    """
    bench, _, deleted = store_of(tmp_path)
    pushes = bench.pushes
    collector = Collector(bench.store, pushes._publisher, pushes._staging, bench.jobs, 100.0)
    statement = PUBLISHER.attest(deleted, ORIGIN_TYPE, OriginPredicate(signed_at_s=1, claims=Claims(licence="MIT")))

    def grow_old(pattern: str, by_s: float) -> None:
        for path in (tmp_path / "store").rglob(pattern):
            os.utime(path, (time.time() - by_s,) * 2)

    async def main() -> CollectReport:
        await collector.collect(TENANT, run=True)
        grow_old("condemned/*", 200.0)
        push = await open_push(pushes, DELETED.files(), DELETED.request())
        await pushes.attest(TENANT, push.push_id, AttestRequest(envelope=statement))
        grow_old("origin-*", age_s)
        report = await collector.collect(TENANT, run=True)
        await commit(pushes, push)
        return report

    report = asyncio.run(main())
    assert f"{TENANT}/manifests/{deleted}" in [freed.key for freed in report.freed]
    origins = [key for key in objects(tmp_path) if f"attestations/{deleted}/origin-" in key]
    assert len(origins) == 1
    assert objects(tmp_path)[origins[0]] == statement


@pytest.mark.parametrize("is_condemned", [False, True])
def test_check_spares_the_statement_of_an_open_push(tmp_path: Path, is_condemned: bool) -> None:
    """The check neither reports such a statement as a fault nor counts it as a leftover."""
    bench, named, deleted = store_of(tmp_path)
    collect(bench)
    statement = PUBLISHER.attest(deleted, ORIGIN_TYPE, OriginPredicate(signed_at_s=1, claims=Claims(licence="MIT")))
    if is_condemned:
        mark = tmp_path / "store" / TENANT / "condemned" / deleted
        mark.parent.mkdir(exist_ok=True)
        mark.touch()

    async def main() -> None:
        push = await open_push(bench.pushes, DELETED.files(), DELETED.request())
        await bench.pushes.attest(TENANT, push.push_id, AttestRequest(envelope=statement))

    asyncio.run(main())
    findings, summary = check(tmp_path, named=named)
    assert findings == []
    assert summary.leftovers == is_condemned  # only the mark
