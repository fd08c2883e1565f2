"""A store with one pushed model, and functions that plant a fault there and return the faulty key."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kelvin.contracts.artifacts.attestation import SEAL_TYPE, read_seal
from kelvin.contracts.artifacts.manifest import version_of
from kelvin.contracts.wire import encode
from kelvin.crypto.signing_keys import Signer, load_signer
from kelvin.crypto.trust_roots import SECRET_FILE
from tests.snapshotter.sender import TENANT


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
    """Swap two packs, so that every chunk is right, and in the wrong place."""
    one, two = store.files("packs")[:2]
    raw = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(raw)
    return store.key(one)


def misplace(store: Store) -> str:
    """Replace an index by another pack's, which decodes."""
    one, two = store.files("index")[:2]
    one.write_bytes(two.read_bytes())
    return store.key(one)


def manifest_of_nothing(store: Store) -> str:
    """Put a valid manifest that names a chunk which is in no pack."""
    raw = store.first("manifests").read_bytes().replace(json_chunk(store), b"0" * 64)
    attest(store, version_of(raw))
    return store.put(f"{TENANT}/manifests/{version_of(raw)}", raw)


def json_chunk(store: Store) -> bytes:
    digest: str = json.loads(store.first("manifests").read_bytes())["chunks"][-1]["digest"]
    return digest.encode()


def manifest_of_other_files(store: Store) -> str:
    """Put a manifest of right chunks whose pinned file has another digest."""
    manifest = json.loads(store.first("manifests").read_bytes())
    manifest["files"][0]["digest"] = "0" * 64
    raw = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    attest(store, version_of(raw))
    return store.put(f"{TENANT}/manifests/{version_of(raw)}", raw)


def attest(store: Store, version: str) -> str:
    """Put the pushed version's attestation, signed for another version."""
    path = store.files("attestations")[0]
    seal = msgspec.structs.replace(read_seal(path.read_bytes(), store.version).seal, version=version)
    raw = load_signer(store.root.parent / SECRET_FILE).attest(version, SEAL_TYPE, seal)
    return store.put(f"{TENANT}/attestations/{version}/{path.name}", raw)


def resealed(store: Store, key: str | None, tolerance: float = 0.01) -> str:
    """Put the seal again with this tolerance, signed by an unknown key, or not signed if `key` is None."""
    path = store.first("attestations")
    seal = read_seal(path.read_bytes(), store.version).seal
    seal = msgspec.structs.replace(seal, probe=msgspec.structs.replace(seal.probe, tolerance=tolerance))
    signer = Signer(Ed25519PrivateKey.generate())
    path.write_bytes(encode(seal) if key is None else signer.attest(store.version, SEAL_TYPE, seal))
    return store.key(path)


def forged(store: Store) -> str:
    """Change a number in the signed payload. It is base64, so no JSON syntax shows it."""
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
                 id="a missing pack"),
    pytest.param(swap_packs, "do not match its name", id="packs in each other's place"),
    pytest.param(lambda s: remove(s, s.first("index")), "the index of a pack is missing", id="a missing index"),
    pytest.param(lambda s: flip(s, s.first("index"), 0), "pack_corrupt", id="an index that does not decode"),
    pytest.param(misplace, "differs from the footer", id="an index of another pack"),
    pytest.param(lambda s: flip(s, s.first("manifests"), 3), "manifest of version", id="a bit of a manifest"),
    pytest.param(lambda s: s.put(f"{TENANT}/manifests/{version_of(b'{}')}", b"{}"), "manifest of version",
                 id="a manifest that does not decode"),
    pytest.param(manifest_of_nothing, "chunks are missing", id="a manifest of a missing chunk"),
    pytest.param(manifest_of_other_files, "the pinned file", id="a manifest of another file"),
    pytest.param(lambda s: remove(s, s.first("attestations"))
                 and s.key(s.first("manifests")), "it has no seal", id="a version that was never sealed"),
    pytest.param(lambda s: flip(s, s.first("attestations"), 0), "attestation",
                 id="an attestation that does not decode"),
    pytest.param(lambda s: attest(s, "f" * 64), "its version does not exist", id="an attestation without a version"),
    pytest.param(lambda s: s.put(f"{TENANT}/attestations/{'e' * 64}/{s.first('attestations').name}",
                                 s.first("attestations").read_bytes()), "speaks of version",
                 id="an attestation under another version"),
    pytest.param(forged, "its signature is not that of", id="a changed number in an attestation"),
    pytest.param(lambda s: resealed(s, None), "it is not signed", id="an unsigned attestation"),
    pytest.param(lambda s: resealed(s, "unknown"), "not trusted here", id="an attestation by an unknown key"),
    pytest.param(attestation_elsewhere, "not that of its fingerprint", id="an attestation under another fingerprint"),
    pytest.param(lambda s: s.put(s.key(s.first("inputs")), b"f" * 64), "which does not exist",
                 id="inputs of a version that does not exist"),
    pytest.param(lambda s: s.put(s.key(s.first("inputs")), b"\xff"), "which does not exist", id="inputs of no text"),
    pytest.param(lambda s: s.put(f"{TENANT}/inputs/{'0' * 64}", s.version.encode()), "made from other inputs",
                 id="inputs that are not the version's"),
    pytest.param(lambda s: s.put(f"{TENANT}/drafts/{s.version}", s.first("manifests").read_bytes()), "did not end",
                 id="a draft without a push"),
    pytest.param(lambda s: remove(s, s.first("manifests")), "its manifest is missing",
                 id="a named version without a manifest"),
    pytest.param(lambda s: remove(s, s.first("inputs")), "no record of the inputs", id="missing inputs"),
    pytest.param(lambda s: s.put(f"{TENANT}/packlists/{s.version}", b"["), "it is damaged", id="a torn pack list"),
    pytest.param(lambda s: s.put(f"{TENANT}/packlists/{s.version}", b"[]"), "other packs", id="an empty pack list"),
    pytest.param(lambda s: s.put(f"{TENANT}/litter/a", b""), "no object of this format", id="an unknown kind"),
]  # fmt: skip
