"""Sign the origin of a pushed version, after checking that everything it covers comes from the local files.

On request, the export is signed as well, in the format of OpenSSF Model Signing, by its library (extra `signing`). The
signature covers the files that `kelvin export` writes: a version does not record which files held its tensors, but its
export is defined. There is no export yet at this point, so the library gets digests computed from the source.
"""

import hashlib
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from kelvin.cli.artifacts.export_layout_policy import LayoutSpan, plan_layout
from kelvin.cli.artifacts.push_source import PushSource
from kelvin.cli.artifacts.source_match_policy import LinearSpace, find_mismatch
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.attestation import ORIGIN_TYPE, P256, Claims, OriginPredicate
from kelvin.contracts.artifacts.manifest import Manifest, decode_manifest
from kelvin.contracts.artifacts.push_api import AttestRequest, Plan
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.wire import convert
from kelvin.crypto.signing_keys import BadKey, Signer, load_signer
from snapshotter.intake.policy.intake import admit

ReadRange = Callable[[int, int], bytes]  # (offset, length) in the version's linear space
BundleSigner = Callable[[Manifest, str, ReadRange], bytes]
SIGNATURE_FILE: Final = "model.sig"  # beside the exported files; the bundle excludes it
_BLOCK: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class PushSigner:
    """The key and the claims that sign a push. `bundle`, if given, makes an OpenSSF bundle as well."""

    signer: Signer
    claims: Claims
    bundle: BundleSigner | None = None

    def sign(
        self, raw: bytes, version: str, plan: Plan, digests: tuple[str, ...], source: PushSource, model: str
    ) -> AttestRequest:
        """Return the statement about the version of manifest `raw`. Raises `Refused` if it has another source."""
        manifest = decode_manifest(raw, version)
        space = LinearSpace(plan)
        intake = admit(source.request(model))
        pinned = {file.path: file.content for file in intake.files}
        if (mismatch := find_mismatch(manifest, space, digests, pinned, intake.tensors)) is not None:
            raise Refused(ArtifactRejected("version", f"nothing was signed: {mismatch}"))
        bundle = None if self.bundle is None else self.bundle(manifest, version, _range_reader(space, source))
        digest = None if bundle is None else blake3(bundle).hexdigest()
        origin = OriginPredicate(signed_at_s=int(time.time()), claims=self.claims, bundle=digest)
        return AttestRequest(envelope=self.signer.attest(version, ORIGIN_TYPE, origin), bundle=bundle)


def read_key(path: Path) -> Signer:
    """Load a signing key. Raises `Refused(InvalidRequest)` if the file holds none."""
    try:
        return load_signer(path)
    except BadKey as bad:
        file, _, rule = str(bad).partition(": ")
        raise Refused(InvalidRequest("sign", file, rule)) from bad


def read_claims(path: Path | None) -> Claims:
    """Read claims from a TOML file. Raises `Refused(InvalidRequest)` with the rule."""
    if path is None:
        return Claims()
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text())
        return convert(found, Claims)
    except OSError as error:
        raise Refused(InvalidRequest("claims", str(path), error.strerror or "can't be read")) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise Refused(InvalidRequest("claims", str(path), str(error))) from error


def _range_reader(space: LinearSpace, source: PushSource) -> ReadRange:
    """Return a reader by chunks. It keeps the last chunk, because neighbouring ranges often share it."""
    latest_chunk: list[tuple[int, bytes]] = []

    def chunk(number: int) -> bytes:
        if not latest_chunk or latest_chunk[0][0] != number:
            latest_chunk[:] = [(number, source.read_chunk(space.plan.chunks[number]))]
        return latest_chunk[0][1]

    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            number = space.chunk_at(offset + len(data))
            within = offset + len(data) - space.start_of(number)
            data += chunk(number)[within : within + nbytes - len(data)]
        return bytes(data)

    return read


def make_bundle_signer(key: Path, signer: Signer) -> Callable[[Manifest, str, ReadRange], bytes]:
    """Return a function that makes bundles with this key. Raises `Refused(InvalidRequest)` without the library, or if
    the key is not P-256.
    """
    if not signer.key_id.startswith(P256):
        rule = "must be an elliptic key (P-256): OpenSSF Model Signing takes no Ed25519"
        raise Refused(InvalidRequest("sign", str(key), rule))
    try:
        import model_signing  # noqa: F401
    except ImportError as error:
        rule = "needs the library 'model-signing' (extra 'signing')"
        raise Refused(InvalidRequest("sign-format", "model-signing", rule)) from error

    def bundle(manifest: Manifest, version: str, read: ReadRange) -> bytes:
        return _sign_bundle(key, version, export_digests(manifest, version, read))

    return bundle


def export_digests(manifest: Manifest, version: str, read: ReadRange) -> dict[str, str]:
    """Return the SHA-256 of each file of a safetensors export, by path."""
    layout = plan_layout(manifest, version)
    found: dict[str, str] = {}
    for path in layout.sizes:
        whole = hashlib.sha256(b"".join(data for name, _, data in layout.fixed if name == path))  # its head
        spans = sorted((span for span in layout.spans if span.path == path), key=lambda span: span.offset)
        for span in spans:
            for data in _read_blocks(span, read):
                whole.update(data)
        found[path] = whole.hexdigest()
    return found


def _read_blocks(span: LayoutSpan, read: ReadRange) -> Iterator[bytes]:
    for at in range(0, span.nbytes, _BLOCK):
        yield read(span.start + at, min(_BLOCK, span.nbytes - at))


def _sign_bundle(key: Path, version: str, digests: dict[str, str]) -> bytes:
    from model_signing import hashing, manifest, signing
    from model_signing._hashing.hashing import Digest

    class Taken(hashing.Config):
        """Precomputed digests, in place of hashing a directory."""

        def hash(self, model_path: object, *, files_to_hash: object = None) -> manifest.Manifest:
            how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE_FILE]}
            serialization = manifest.SerializationType.from_args(how)
            items = [
                serialization.new_item(path, Digest("sha256", bytes.fromhex(digest)))
                for path, digest in digests.items()
            ]
            return manifest.Manifest(version, items, serialization)

    with tempfile.TemporaryDirectory(prefix="kelvin-sign-") as scratch:
        path = Path(scratch) / SIGNATURE_FILE
        config = signing.Config()  # type: ignore[no-untyped-call]
        config.set_hashing_config(Taken()).use_elliptic_key_signer(private_key=key)  # type: ignore[no-untyped-call]
        config.sign(scratch, path)
        return path.read_bytes()
