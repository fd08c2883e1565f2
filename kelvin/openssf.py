"""A signature of a version's export in the format of OpenSSF Model Signing, made by its library (extra `signing`).

It covers the files that `kelvin export` writes, so that the public tool verifies them: which files held the tensors is
no part of a version, but how they are exported is. The signed manifest of the library is made of digests that are taken
of the source, as no export lies there yet.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from contracts.errors import InvalidRequest, Refused
from contracts.manifest import Manifest
from contracts.signatures import P256
from kelvin.policy.export_layout import Span, lay_out
from service.signing import Signer

SIGNATURE_FILE: Final = "model.sig"  # beside the exported files; the bundle says that it is none of them
_BLOCK: Final = 8 << 20

Read = Callable[[int, int], bytes]


def bundler(key: Path, signer: Signer) -> Callable[[Manifest, str, Read], bytes]:
    """Makes bundles with a file's key. Raises `Refused(InvalidRequest)` without the library, or for another key."""
    if not signer.key_id.startswith(P256):
        rule = "must be an elliptic key (P-256): OpenSSF Model Signing takes no Ed25519"
        raise Refused(InvalidRequest("sign", str(key), rule))
    try:
        import model_signing  # noqa: F401
    except ImportError as error:
        rule = "needs the library 'model-signing' (extra 'signing')"
        raise Refused(InvalidRequest("sign-format", "model-signing", rule)) from error

    def bundle(manifest: Manifest, version: str, read: Read) -> bytes:
        return _sign(key, version, export_digests(manifest, version, read))

    return bundle


def export_digests(manifest: Manifest, version: str, read: Read) -> dict[str, str]:
    """SHA-256 of each file of an export as safetensors, by path."""
    layout = lay_out(manifest, version)
    found: dict[str, str] = {}
    for path in layout.sizes:
        whole = hashlib.sha256(b"".join(data for name, _, data in layout.fixed if name == path))  # its head
        spans = sorted((span for span in layout.spans if span.path == path), key=lambda span: span.offset)
        for span in spans:
            for data in _blocks(span, read):
                whole.update(data)
        found[path] = whole.hexdigest()
    return found


def _blocks(span: Span, read: Read) -> Iterator[bytes]:
    for at in range(0, span.nbytes, _BLOCK):
        yield read(span.start + at, min(_BLOCK, span.nbytes - at))


def _sign(key: Path, version: str, digests: dict[str, str]) -> bytes:
    from model_signing import hashing, manifest, signing
    from model_signing._hashing.hashing import Digest

    class Taken(hashing.Config):
        """Digests that were taken already, instead of a directory to hash."""

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
