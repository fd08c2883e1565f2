"""The check finds every fault that is planted, each finding says what mends it, and mended it is clean again."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blobstore.files import FileStore
from blobstore.store import BlobStat, BlobStore, BlobUnavailable
from blobstore.verifying import VerifyingStore
from contracts.attestation import SEAL, read_seal
from contracts.manifest import decode_manifest, encode_manifest, version_of
from contracts.push import FsckBroken, FsckFinding, FsckLine, FsckProgress, FsckSummary
from contracts.wire import encode
from service.signing import Signer, load_signer
from service.trust import SECRET_FILE
from snapshotter.fsck import Fsck
from tests.snapshotter.bench import TENANT, Bench, attestations_over, push
from tests.snapshotter.models import Model

OTHER = Model(more={"generation_config.json": b'{"top_k": 3}'})


Named = Callable[[str], Awaitable[tuple[str, ...]]]


def naming(*versions: str) -> Named:
    """A registry that names these."""

    async def named(tenant: str) -> tuple[str, ...]:
        return versions

    return named


def lines_of(data: Path, running: bool = False, named: tuple[str, ...] | None = None) -> list[FsckLine]:
    """What the check says; models name what has a manifest, unless it is given."""
    there = tuple(path.name for path in (data / "store" / TENANT / "manifests").iterdir())
    registry = naming(*(there if named is None else named))
    inner = VerifyingStore(FileStore(data / "store"))
    fsck = Fsck(inner, lambda tenant: running, registry, attestations_over(data, inner))

    async def collect() -> list[FsckLine]:
        return [line async for line in fsck.check(TENANT)]

    return asyncio.run(collect())


def check(
    data: Path, running: bool = False, named: tuple[str, ...] | None = None
) -> tuple[list[FsckFinding], FsckSummary]:
    *lines, last = lines_of(data, running, named)
    assert isinstance(last, FsckSummary)
    findings = [line for line in lines if isinstance(line, FsckFinding)]
    assert last.findings == len(findings)
    return findings, last


@dataclass(frozen=True)
class Store:
    """A store directory that one model was pushed to."""

    root: Path
    version: str

    def files(self, kind: str) -> list[Path]:
        return sorted(path for path in (self.root / TENANT / kind).rglob("*") if path.is_file())

    def first(self, kind: str) -> Path:
        return self.files(kind)[0]

    def key(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def put(self, key: str, raw: bytes) -> str:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(raw)
        return key


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", push(Bench.over(tmp_path), Model()).version)


def flip(store: Store, path: Path, at: int) -> str:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    return store.key(path)


def cut(store: Store, path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-20])
    return store.key(path)


def remove(store: Store, path: Path) -> str:
    path.unlink()
    return store.key(path)


def swap_packs(store: Store) -> str:
    """Each under the other's name: every chunk is right, and in the wrong place."""
    one, two = store.files("packs")[:2]
    raw = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(raw)
    return store.key(one)


def misplace(store: Store) -> str:
    """An index that decodes, and is another pack's."""
    one, two = store.files("index")[:2]
    one.write_bytes(two.read_bytes())
    return store.key(one)


def manifest_of_nothing(store: Store) -> str:
    """A manifest that is right in itself and names a chunk that nobody has."""
    raw = store.first("manifests").read_bytes().replace(json_chunk(store), b"0" * 64)
    attest(store, version_of(raw))
    return store.put(f"{TENANT}/manifests/{version_of(raw)}", raw)


def json_chunk(store: Store) -> bytes:
    digest: str = json.loads(store.first("manifests").read_bytes())["chunks"][-1]["digest"]
    return digest.encode()


def manifest_of_other_files(store: Store) -> str:
    """A manifest whose chunks are right, but whose pinned file has another digest."""
    manifest = json.loads(store.first("manifests").read_bytes())
    manifest["files"][0]["digest"] = "0" * 64
    raw = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    attest(store, version_of(raw))
    return store.put(f"{TENANT}/manifests/{version_of(raw)}", raw)


def attest(store: Store, version: str) -> str:
    """The attestation of the pushed version, written and signed for another."""
    path = store.files("attestations")[0]
    seal = msgspec.structs.replace(read_seal(path.read_bytes(), store.version).seal, version=version)
    raw = load_signer(store.root.parent / SECRET_FILE).attest(version, SEAL, seal)
    return store.put(f"{TENANT}/attestations/{version}/{path.name}", raw)


def resealed(store: Store, key: str | None, tolerance: float = 0.01) -> str:
    """The same seal with another tolerance: by the installation's key, a stranger's, or not signed."""
    path = store.first("attestations")
    seal = read_seal(path.read_bytes(), store.version).seal
    seal = msgspec.structs.replace(seal, probe=msgspec.structs.replace(seal.probe, tolerance=tolerance))
    signer = Signer(Ed25519PrivateKey.generate())
    path.write_bytes(encode(seal) if key is None else signer.attest(store.version, SEAL, seal))
    return store.key(path)


def forged(store: Store) -> str:
    """A number in the signed payload is another one; base64, so no byte of JSON would tell."""
    path = store.first("attestations")
    envelope = json.loads(path.read_bytes())
    payload = base64.b64decode(envelope["payload"])
    assert b'"tolerance":0.01' in payload
    envelope["payload"] = base64.b64encode(payload.replace(b'"tolerance":0.01', b'"tolerance":9.01')).decode()
    path.write_bytes(json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode())
    return store.key(path)


def attestation_elsewhere(store: Store) -> str:
    path = store.first("attestations")
    return store.put(f"{TENANT}/attestations/{store.version}/seal-{'0' * 16}", path.read_bytes())


FAULTS = [
    pytest.param(lambda s: flip(s, s.first("packs"), 5000), "do not match their digests", id="a bit of a chunk"),
    pytest.param(lambda s: flip(s, s.first("packs"), -9), "its footer", id="a bit of a footer's length"),
    pytest.param(lambda s: flip(s, s.first("packs"), -30), "do not match", id="a bit of a footer's table"),
    pytest.param(lambda s: cut(s, s.first("packs")), "its footer", id="a pack that was cut"),
    pytest.param(lambda s: s.first("packs").write_bytes(b"") or s.key(s.first("packs")), "its footer",
                 id="a pack of no bytes"),
    pytest.param(lambda s: remove(s, s.first("packs")).replace("/packs/", "/index/"), "its pack is missing",
                 id="a pack that is gone"),
    pytest.param(swap_packs, "do not match its name", id="packs in each other's place"),
    pytest.param(lambda s: remove(s, s.first("index")), "the index of a pack is missing", id="an index that is gone"),
    pytest.param(lambda s: flip(s, s.first("index"), 0), "pack_corrupt", id="an index that does not decode"),
    pytest.param(misplace, "differs from the footer", id="an index of another pack"),
    pytest.param(lambda s: flip(s, s.first("manifests"), 3), "does not match its digest", id="a bit of a manifest"),
    pytest.param(lambda s: s.put(f"{TENANT}/manifests/{version_of(b'{}')}", b"{}"), "manifest of version",
                 id="a manifest that does not decode"),
    pytest.param(manifest_of_nothing, "chunks are missing", id="a manifest of a chunk that nobody has"),
    pytest.param(manifest_of_other_files, "the pinned file", id="a manifest of another file"),
    pytest.param(lambda s: remove(s, s.first("attestations"))
                 and s.key(s.first("manifests")), "no attestation", id="a version that was never sealed"),
    pytest.param(lambda s: flip(s, s.first("attestations"), 0), "attestation",
                 id="an attestation that does not decode"),
    pytest.param(lambda s: attest(s, "f" * 64), "its version does not exist", id="an attestation of nothing"),
    pytest.param(lambda s: s.put(f"{TENANT}/attestations/{'e' * 64}/{s.first('attestations').name}",
                                 s.first("attestations").read_bytes()), "speaks of version",
                 id="an attestation under another version"),
    pytest.param(forged, "its signature is not that of", id="a changed number in an attestation"),
    pytest.param(lambda s: resealed(s, None), "it is not signed", id="an attestation that nobody signed"),
    pytest.param(lambda s: resealed(s, "a stranger's"), "not trusted here", id="an attestation by a stranger's key"),
    pytest.param(attestation_elsewhere, "not that of its fingerprint", id="an attestation under another fingerprint"),
    pytest.param(lambda s: s.put(s.key(s.first("inputs")), b"f" * 64), "which does not exist",
                 id="inputs of a version that does not exist"),
    pytest.param(lambda s: s.put(s.key(s.first("inputs")), b"\xff"), "which does not exist", id="inputs of no text"),
    pytest.param(lambda s: s.put(f"{TENANT}/inputs/{'0' * 64}", s.version.encode()), "made of other inputs",
                 id="inputs that are not the version's"),
    pytest.param(lambda s: s.put(f"{TENANT}/drafts/{s.version}", s.first("manifests").read_bytes()), "did not end",
                 id="a draft that was left over"),
    pytest.param(lambda s: remove(s, s.first("manifests")), "its manifest is missing",
                 id="a named version's manifest that is gone"),
    pytest.param(lambda s: remove(s, s.first("inputs")), "nothing says of which inputs", id="inputs that are gone"),
    pytest.param(lambda s: s.put(f"{TENANT}/condemned/{'0' * 64}", b""), "marks a version that does not exist",
                 id="a mark of nothing"),
    pytest.param(lambda s: s.put(f"{TENANT}/litter/a", b""), "no object of this format", id="an object of no kind"),
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize(("plant", "fault"), FAULTS)
def test_finds(tmp_path: Path, store: Store, plant: Callable[[Store], str], fault: str) -> None:
    """The fault is found under its key; what the finding says mends it; then the check is clean."""
    key = plant(store)
    findings, _ = check(tmp_path, named=(store.version,))
    fault = {"pack_corrupt": "pack "}.get(fault, fault)
    assert any(finding.key == key and fault in finding.fault for finding in findings), findings
    for _ in range(3):  # a version that is given up leaves what referred to it
        mend(tmp_path, findings)
        findings, _ = check(tmp_path)
    assert findings == []


def mend(data: Path, findings: list[FsckFinding], *models: Model) -> None:
    """Do as each finding says: delete what it names (itself, and keys in its text), then push again."""
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
HARMS: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "missing": lambda raw, other: None,
    "empty": lambda raw, other: b"",
    "truncated": lambda raw, other: raw[: len(raw) // 2],
    "grown": lambda raw, other: raw + b"x",
    "flipped at its start": lambda raw, other: bytes([raw[0] ^ 1]) + raw[1:],
    "flipped at its end": lambda raw, other: raw[:-1] + bytes([raw[-1] ^ 1]),
    "zeros": lambda raw, other: bytes(len(raw)),
    "another one's": lambda raw, other: other,
}


@pytest.mark.deep
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_way(tmp_path: Path, store: Store, kind: str, harm: str) -> None:
    """Whichever object is harmed, however: something is found that names it or its version, and the advice mends it."""
    other = push(Bench.over(tmp_path), OTHER).version
    named = (store.version, other)
    assert check(tmp_path, named=named)[0] == []
    one, two = store.files(kind)[:2]
    raw = HARMS[harm](one.read_bytes(), two.read_bytes())
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


def test_a_version_that_nobody_names_is_no_fault(tmp_path: Path, store: Store) -> None:
    """It waits for a collection, with its mark or without: the summary counts it."""
    push(Bench.over(tmp_path), OTHER)
    store.put(f"{TENANT}/condemned/{store.version}", b"")
    findings, summary = check(tmp_path, named=())
    assert (findings, summary.versions, summary.unnamed_versions) == ([], 2, 2)


def test_a_collection_beside_it_is_no_fault(tmp_path: Path, store: Store) -> None:
    """What it takes away while the check reads is not missed."""
    push(Bench.over(tmp_path), OTHER)

    class Collected(FileStore):
        async def stat(self, key: str) -> BlobStat:
            for kind in ("inputs", "manifests", "attestations", "index", "packs"):
                for path in store.files(kind):
                    path.unlink()
            return await super().stat(key)

    async def collect() -> list[FsckLine]:
        inner = VerifyingStore(Collected(tmp_path / "store"))
        fsck = Fsck(inner, lambda tenant: True, naming(), attestations_over(tmp_path, inner))
        return [line async for line in fsck.check(TENANT)]

    lines = asyncio.run(collect())
    assert isinstance(lines[-1], FsckSummary)
    assert [line for line in lines if isinstance(line, FsckFinding)] == []


def test_clean(tmp_path: Path, store: Store) -> None:
    """Without a fault nothing is found, all bytes were read, and what no version uses is counted, not accused."""
    push(Bench.over(tmp_path), OTHER)
    findings, summary = check(tmp_path)
    assert findings == []
    assert (summary.versions, summary.packs, summary.unreferenced_chunks) == (2, 3, 0)
    assert summary.checked_bytes == sum(path.stat().st_size for path in store.files("packs"))
    for kind in ("manifests", "attestations", "inputs"):
        for path in store.files(kind):
            path.unlink()
    findings, summary = check(tmp_path)
    assert findings == []
    assert summary.unreferenced_chunks == summary.chunks > 0


def test_progress(tmp_path: Path, store: Store) -> None:
    """Progress only grows, and ends at all."""
    steps = [line for line in lines_of(tmp_path) if isinstance(line, FsckProgress)]
    assert [step.checked_bytes for step in steps] == sorted({step.checked_bytes for step in steps})
    assert steps[-1].checked_bytes == steps[-1].total_bytes


def test_what_a_running_push_leaves_is_no_fault(tmp_path: Path, store: Store) -> None:
    """A draft, and a pack before its index, belong to a push that runs; the summary says that there was one."""
    store.put(f"{TENANT}/drafts/{'0' * 64}", b"{}")
    for path in (store.first("index"), store.first("manifests"), store.first("attestations"), store.first("inputs")):
        path.unlink()
    assert check(tmp_path, running=False)[0]
    findings, summary = check(tmp_path, running=True)
    assert findings == []
    assert summary.pushes_running


def test_a_store_that_fails(tmp_path: Path, store: Store) -> None:
    """A check that can't go on says so instead of a summary: silence is no verdict."""

    class Failing(FileStore):
        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            if "/packs/" in key:
                raise BlobUnavailable("gone")
            return await super().read(key, offset, length)

    async def collect(inner: BlobStore) -> list[FsckLine]:
        fsck = Fsck(inner, lambda tenant: False, naming(), attestations_over(tmp_path, inner))
        return [line async for line in fsck.check(TENANT)]

    last = asyncio.run(collect(Failing(tmp_path / "store")))[-1]
    assert isinstance(last, FsckBroken)
    assert last.failure.code == "unavailable"


def test_one_at_a_time(tmp_path: Path, store: Store) -> None:
    """A second check is told to come back; after the first one's end, or its client's, there is room."""

    async def scenario() -> None:
        inner = VerifyingStore(FileStore(tmp_path / "store"))
        fsck = Fsck(inner, lambda tenant: False, naming(store.version), attestations_over(tmp_path, inner))
        first = fsck.check(TENANT)
        await anext(first)
        (refused,) = [line async for line in fsck.check(TENANT)]
        assert isinstance(refused, FsckBroken)
        assert refused.failure.code == "overloaded"
        await first.aclose()  # type: ignore[attr-defined]
        assert isinstance([line async for line in fsck.check(TENANT)][-1], FsckSummary)

    asyncio.run(scenario())


def test_the_planted_manifests_are_manifests(store: Store) -> None:
    """The control of two faults above: without the change, the rewritten manifest is the pushed one."""
    raw = store.first("manifests").read_bytes()
    assert json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode() == raw
    assert encode_manifest(decode_manifest(raw, store.version)) == raw
