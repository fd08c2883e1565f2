"""The check finds every planted fault, and following the advice of its findings makes the store clean again."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from blake3 import blake3

from kelvin.blobstore.blob_store import BlobNotFound, BlobStat, BlobStore, BlobUnavailable
from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.verifying_store import VerifyingStore
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import decode_manifest, encode_manifest
from kelvin.contracts.artifacts.object_keys import object_name
from kelvin.contracts.artifacts.push_api import FsckBroken, FsckFinding, FsckLine, FsckProgress, FsckSummary
from kelvin.contracts.errors import Refused
from snapshotter.maintenance.fsck import MAX_CHECKS, Fsck
from snapshotter.push.staging import Staging
from snapshotter.store.catalog import Catalog
from snapshotter.store.exports import Exports
from tests.snapshotter.bench import Bench, attestations_over, push
from tests.snapshotter.models import Model, default_weights
from tests.snapshotter.planted import FAULTS, Store, flip
from tests.snapshotter.sender import TENANT
from tests.snapshotter.tensors_files import KeptModel

OTHER = Model(more={"generation_config.json": b'{"top_k": 3}'})
KEPT = (KeptModel(), KeptModel(shards={"model.safetensors": default_weights(seed=70)}))


def fsck_of(
    data: Path, inner: BlobStore | None = None, running: bool = False, named: tuple[str, ...] | None = None
) -> Fsck:
    """Return the check of a data directory. By default models name every version that has a manifest."""
    store = VerifyingStore(inner or FileStore(data / "store"))
    if named is None:
        named = tuple(path.name for path in (data / "store" / TENANT / "manifests").iterdir())

    async def versions(tenant: str) -> tuple[str, ...]:
        return named

    pending_versions = Staging(data / "staging", 8).pending_versions
    return Fsck(store, lambda tenant: running, versions, attestations_over(data, store), pending_versions)


async def lines_of(fsck: Fsck) -> list[FsckLine]:
    return [line async for line in fsck.check(TENANT)]


def findings_of(lines: list[FsckLine]) -> tuple[list[FsckFinding], FsckSummary]:
    """Return the findings and the summary of a finished check."""
    last = lines[-1]
    assert isinstance(last, FsckSummary)
    findings = [line for line in lines if isinstance(line, FsckFinding)]
    assert last.findings == len(findings)
    return findings, last


def check(
    data: Path, running: bool = False, named: tuple[str, ...] | None = None
) -> tuple[list[FsckFinding], FsckSummary]:
    return findings_of(asyncio.run(lines_of(fsck_of(data, None, running, named))))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", push(Bench.over(tmp_path), Model()).version)


@pytest.mark.deep
@pytest.mark.parametrize(("plant", "fault"), FAULTS)
def test_fault_is_found_and_its_advice_repairs_it(
    tmp_path: Path, store: Store, plant: Callable[[Store], str], fault: str
) -> None:
    """The fault is found under its key. After following the advice, the check is clean."""
    key = plant(store)
    findings, _ = check(tmp_path, named=(store.version,))
    fault = {"pack_corrupt": "pack "}.get(fault, fault)
    assert any(finding.key == key and fault in finding.fault for finding in findings), findings
    for _ in range(3):  # giving up a version leaves objects that referred to it
        mend(tmp_path, findings)
        findings, _ = check(tmp_path)
    assert findings == []


def mend(data: Path, findings: list[FsckFinding], *models: Model) -> None:
    """Follow each finding's advice: delete the keys that it names, then push the models again."""
    for finding in findings:
        words = finding.mend.replace(",", " ").replace(":", " ").split()
        if "delete" in words:
            (data / "store" / finding.key).unlink(missing_ok=True)
            for word in words:
                if word.startswith(f"{TENANT}/"):
                    (data / "store" / word).unlink(missing_ok=True)
    for model in models or (Model(),):
        push(Bench.over(data), model)


KINDS = ("packs", "index", "manifests", "attestations", "inputs")
DAMAGES: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "missing": lambda raw, other: None,
    "empty": lambda raw, other: b"",
    "truncated": lambda raw, other: raw[: len(raw) // 2],
    "grown": lambda raw, other: raw + b"x",
    "flipped at its start": lambda raw, other: bytes([raw[0] ^ 1]) + raw[1:],
    "flipped at its end": lambda raw, other: raw[:-1] + bytes([raw[-1] ^ 1]),
    "zeros": lambda raw, other: bytes(len(raw)),
    "another object's": lambda raw, other: other,
}


@pytest.mark.deep
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_is_found_and_repaired(tmp_path: Path, store: Store, kind: str, damage: str) -> None:
    """Any damage to any object gives a finding with its name or its version's, and the advice repairs it."""
    other = push(Bench.over(tmp_path), OTHER).version
    named = (store.version, other)
    assert check(tmp_path, named=named)[0] == []
    one, two = store.files(kind)[:2]
    raw = DAMAGES[damage](one.read_bytes(), two.read_bytes())
    if raw is None:
        one.unlink()
    else:
        one.write_bytes(raw)
    findings, _ = check(tmp_path, named=named)
    names = {one.name, one.parent.name} & {store.version, other} or {one.name}
    assert any(name in finding.key + finding.fault for finding in findings for name in names), findings
    for _ in range(3):
        mend(tmp_path, findings)
        push(Bench.over(tmp_path), OTHER)
        findings, _ = check(tmp_path, named=named)
    assert findings == []


def test_unnamed_version_is_no_fault(tmp_path: Path, store: Store) -> None:
    """An unnamed version, with or without a mark, is counted in the summary, not reported."""
    push(Bench.over(tmp_path), OTHER)
    store.put(f"{TENANT}/condemned/{store.version}", b"")
    findings, summary = check(tmp_path, named=())
    assert (findings, summary.versions, summary.unnamed_versions) == ([], 2, 2)


def test_refused_push_leaves_no_fault(tmp_path: Path, store: Store) -> None:
    """A push is refused while its draft is sealed. Its packs and its pack list wait for a collection."""
    bench = Bench.over(tmp_path)
    push(bench, Model())
    bench.jobs.failure = ArtifactRejected("model", "it can't be loaded")
    with pytest.raises(Refused):
        push(bench, OTHER)
    assert len(store.files("packlists")) == 2
    findings, summary = check(tmp_path)
    assert (findings, summary.versions) == ([], 1)
    asyncio.run(bench.collector.collect(TENANT, run=True))
    assert [path.name for path in store.files("packlists")] == [store.version]
    findings, summary = check(tmp_path)
    assert (findings, summary.unreferenced_chunks) == ([], 0)


async def test_concurrent_collection_is_no_fault(tmp_path: Path, store: Store) -> None:
    """Objects that a collection frees during the check are not reported as missing."""
    await Bench.over(tmp_path).push(OTHER.files(), OTHER.request())

    class Collected(FileStore):
        async def stat(self, key: str) -> BlobStat:
            for kind in ("inputs", "manifests", "attestations", "packlists", "index", "packs"):
                for path in store.files(kind):
                    path.unlink()
            return await super().stat(key)

    findings, _ = findings_of(await lines_of(fsck_of(tmp_path, Collected(tmp_path / "store"), running=True, named=())))
    assert findings == []


def test_damaged_manifest_is_one_fault(tmp_path: Path, store: Store) -> None:
    """The finding names the manifest, not a chunk, and objects that refer to its version are not reported."""
    manifest = store.first("manifests")
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    (finding,), _ = check(tmp_path, named=(store.version,))
    assert finding.key == store.key(manifest)
    assert finding.fault.startswith(f"manifest of version {store.version}: ")
    assert "chunk" not in finding.fault


def test_lost_store_names_what_brings_it_back(tmp_path: Path, store: Store) -> None:
    """Models name a version and the store is empty, as after `kelvin restore` without the store."""
    for path in (tmp_path / "store" / TENANT).rglob("*"):
        if path.is_file():
            path.unlink()
    (finding,), _ = check(tmp_path, named=(store.version,))
    assert finding.mend.startswith("restore the store from your own copy")


def test_healthy_store_has_no_findings(tmp_path: Path, store: Store) -> None:
    """A check of a healthy store reads all bytes and finds nothing. Unused chunks are counted, not reported."""
    push(Bench.over(tmp_path), OTHER)
    findings, summary = check(tmp_path)
    assert findings == []
    assert (summary.versions, summary.packs, summary.unreferenced_chunks) == (2, 3, 0)
    assert summary.checked_bytes == sum(path.stat().st_size for path in store.files("packs"))
    for kind in ("manifests", "attestations", "inputs", "packlists"):
        for path in store.files(kind):
            path.unlink()
    findings, summary = check(tmp_path)
    assert findings == []
    assert summary.unreferenced_chunks == summary.chunks > 0


async def test_progress_grows_to_the_total(tmp_path: Path, store: Store) -> None:
    """Progress only grows, and ends at the total."""
    steps = [line for line in await lines_of(fsck_of(tmp_path)) if isinstance(line, FsckProgress)]
    assert [step.checked_bytes for step in steps] == sorted({step.checked_bytes for step in steps})
    assert steps[-1].checked_bytes == steps[-1].total_bytes


def test_objects_of_a_running_push_are_no_fault(tmp_path: Path, store: Store) -> None:
    """A draft, and a pack without an index, belong to a running push. The summary reports that one was running."""
    store.put(f"{TENANT}/drafts/{'0' * 64}", b"{}")
    for path in (store.first("index"), store.first("manifests"), store.first("attestations"), store.first("inputs")):
        path.unlink()
    assert check(tmp_path, running=False)[0]
    findings, summary = check(tmp_path, running=True)
    assert findings == []
    assert summary.pushes_running


async def test_push_that_ends_during_the_check_is_no_fault(tmp_path: Path, store: Store) -> None:
    """A new pack was read before its index was listed. No finding advises to delete it, though a chunk is missing."""
    pack, *_ = store.files("packs")
    before = {*store.files("packs"), *store.files("inputs")}
    other = Model(shards={"model.safetensors": default_weights(seed=9)})
    version = (await Bench.over(tmp_path).push(other.files(), other.request())).version
    packs = {path.name for path in {*store.files("packs")} - before}
    unlisted = {version, *(path.name for path in {*store.files("inputs")} - before)}
    pack.unlink()
    (store.root / TENANT / "index" / pack.name).unlink()

    class Late(FileStore):
        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            if key.startswith(f"{TENANT}/index/") and object_name(key) in packs:
                raise BlobNotFound(key)
            return await super().read(key, offset, length)

        async def list(self, prefix: str) -> AsyncIterator[str]:
            async for key in super().list(prefix):
                if unlisted.isdisjoint(key.split("/")):
                    yield key

    findings, summary = findings_of(await lines_of(fsck_of(tmp_path, Late(tmp_path / "store"), named=(store.version,))))
    assert {finding.key.split("/")[1] for finding in findings} == {"manifests", "packlists"}
    assert summary.leftovers == 0


async def test_unreadable_store_breaks_the_check(tmp_path: Path, store: Store) -> None:
    """A check that can't read the store ends with the failure instead of a summary."""
    await Bench.over(tmp_path).push(OTHER.files(), OTHER.request())  # more objects than may be unreadable

    class Failing(FileStore):
        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            raise BlobUnavailable("gone")

    *_, last = await lines_of(fsck_of(tmp_path, Failing(tmp_path / "store"), named=()))
    assert isinstance(last, FsckBroken)
    assert last.failure.code == "unavailable"


@pytest.mark.parametrize("kind", ["packs", "index", "manifests", "attestations", "inputs", "packlists"])
async def test_object_that_cannot_be_read_ends_no_check(tmp_path: Path, store: Store, kind: str) -> None:
    """The unreadable object is named, together with the findings in the rest of the store."""
    await Bench.over(tmp_path).push(OTHER.files(), OTHER.request())
    unreadable, planted = store.key(store.first(kind)), store.put(f"{TENANT}/litter/a", b"")

    class Sick(FileStore):
        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            if key == unreadable:
                raise BlobUnavailable("EIO")
            return await super().read(key, offset, length)

        async def stat(self, key: str) -> BlobStat:
            if key == unreadable:
                raise BlobUnavailable("EIO")
            return await super().stat(key)

    found, _ = findings_of(await lines_of(fsck_of(tmp_path, Sick(tmp_path / "store"), named=(store.version,))))
    findings = {finding.key: finding.fault for finding in found}
    named = unreadable.rpartition("/")[0] + "/" if kind == "attestations" else unreadable.replace("/index/", "/packs/")
    assert "can't be read now" in findings.pop(named)
    consequences = {"packs": "manifests", "index": "manifests"}.get(kind)  # chunks that could not be verified
    assert {key.split("/")[1] for key in findings} == {"litter", consequences} - {None}
    assert planted in findings
    advice = {finding.key.split("/")[1]: finding.mend for finding in found}
    if consequences:
        assert advice[consequences] == "make the packs above readable, then check again"


async def test_pack_that_cannot_be_read_twice_ends_no_check(tmp_path: Path, store: Store) -> None:
    """The chunks were verified, but the pinned files can't be read: the version is named, and the check goes on."""

    class Failing(FileStore):
        fails = False

        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            if self.fails and "/packs/" in key:
                raise BlobUnavailable("EIO")
            return await super().read(key, offset, length)

        async def read_into(self, key: str, offset: int, into: memoryview) -> None:
            if self.fails and "/packs/" in key:
                raise BlobUnavailable("EIO")
            await super().read_into(key, offset, into)

    lines, inner = [], Failing(tmp_path / "store")
    async for line in fsck_of(tmp_path, inner, named=(store.version,)).check(TENANT):
        lines.append(line)
        inner.fails = isinstance(line, FsckProgress) and line.checked_bytes == line.total_bytes
    (finding,), _ = findings_of(lines)
    assert finding.key == store.key(store.first("manifests"))
    assert "can't be read now" in finding.fault


async def test_concurrent_checks_are_bounded(tmp_path: Path, store: Store) -> None:
    """A second check of a tenant is refused until the first one ends or its client leaves.

    At most `MAX_CHECKS` checks run for all tenants together, so a client that does not read blocks only its own tenant.
    """
    fsck = fsck_of(tmp_path)
    first = fsck.check(TENANT)
    await anext(first)
    (refused,) = await lines_of(fsck)
    assert isinstance(refused, FsckBroken)
    assert refused.failure.code == "overloaded"
    others = [fsck.check(f"tenant-{number}") for number in range(MAX_CHECKS)]
    for other in others[:-1]:
        assert not isinstance(await anext(other), FsckBroken)
    assert isinstance(await anext(others[-1]), FsckBroken)
    for other in others:
        await other.aclose()  # type: ignore[attr-defined]
    await first.aclose()  # type: ignore[attr-defined]
    findings_of(await lines_of(fsck))


def test_the_planted_manifests_are_manifests(store: Store) -> None:
    """The control of two planted faults: rewriting the manifest without a change gives the pushed one."""
    raw = store.first("manifests").read_bytes()
    assert json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode() == raw
    assert encode_manifest(decode_manifest(raw, store.version)) == raw


async def test_version_collected_meanwhile_does_not_break_the_check(tmp_path: Path, store: Store) -> None:
    """The packs are freed after they were checked, so the version's pinned files can't be read."""
    async for line in fsck_of(tmp_path, named=()).check(TENANT):
        if isinstance(line, FsckProgress) and line.checked_bytes == line.total_bytes:
            shutil.rmtree(tmp_path / "store" / TENANT)
    assert isinstance(line, FsckSummary)


@pytest.mark.deep
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["packs", "index"])
def test_every_damage_to_a_kept_file_is_found(tmp_path: Path, kind: str, damage: str) -> None:
    """Any damage to a kept tensorizer file or its index is found, and the advice restores the pushed bytes."""
    named = tuple(push(Bench.over(tmp_path), model).version for model in KEPT)
    one, two = sorted((tmp_path / "store" / TENANT / kind).glob("*.tensors"))
    right = one.read_bytes()
    assert check(tmp_path, named=named)[0] == []
    raw = DAMAGES[damage](right, two.read_bytes())
    if raw is None:
        one.unlink()
    else:
        one.write_bytes(raw)
    findings, _ = check(tmp_path, named=named)
    assert any(one.name in finding.key for finding in findings), findings
    for _ in range(3):
        mend(tmp_path, findings, *KEPT)
        findings, _ = check(tmp_path, named=named)
    assert findings == []
    assert one.read_bytes() == right


def test_flipped_byte_outside_of_chunks_is_found(tmp_path: Path) -> None:
    """A flipped bit of a kept file outside of its chunks is found, because the file is not the pushed one."""
    push(Bench.over(tmp_path), KEPT[0])
    (path,) = (tmp_path / "store" / TENANT / "packs").glob("*.tensors")
    flip(Store(tmp_path / "store", ""), path, -1)
    (finding,) = check(tmp_path)[0]
    assert (finding.key, finding.fault) == (f"{TENANT}/packs/{path.name}", "its bytes do not match its name")


def test_wrong_index_of_a_kept_file_is_named(tmp_path: Path) -> None:
    """If the index is valid, but one byte off, the finding names the index, not the file."""
    version = push(Bench.over(tmp_path), KEPT[0]).version
    (path,) = (tmp_path / "store" / TENANT / "index").glob("*.tensors")
    raw = path.read_bytes()
    at = json.loads(raw)["chunks"][0][1][0][0]
    path.write_bytes(raw.replace(b"[%d," % at, b"[%d," % (at - 1), 1))
    findings, _ = check(tmp_path)
    assert [finding.key for finding in findings] == [
        f"{TENANT}/index/{path.name}", f"{TENANT}/manifests/{version}"
    ]  # fmt: skip
    mend(tmp_path, findings, KEPT[0])
    assert (check(tmp_path)[0], path.read_bytes()) == ([], raw)


async def test_export_uses_a_repaired_index(tmp_path: Path) -> None:
    """An export works after the index was repaired, also in a process that had cached the wrong index."""
    bench = Bench.over(tmp_path)
    await bench.push(KEPT[0].files(), KEPT[0].request())
    (path,) = (tmp_path / "store" / TENANT / "index").glob("*.tensors")
    raw = path.read_bytes()
    digest, ((at, _), *_) = json.loads(raw)["chunks"][0]
    path.write_bytes(raw.replace(b"[%d," % at, b"[%d," % (at - 1), 1))
    catalog = Catalog(bench.store)
    exports = Exports(bench.store, catalog, bench.jobs.list_named_versions)
    with pytest.raises(Refused, match="chunk_corrupt"):
        await exports.chunk(TENANT, digest)
    path.unlink()
    await catalog.stored_chunks(TENANT)  # as a push does when it asks for missing chunks
    await bench.push(KEPT[0].files(), KEPT[0].request())
    assert path.read_bytes() == raw
    assert blake3(await exports.chunk(TENANT, digest)).hexdigest() == digest
