"""Private keys that sign attestations, from a PEM file or created once. `trust_roots` decides which are trusted."""

from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from kelvin.contracts.artifacts.attestation import (
    SUPPORTED_KEYS,
    encode_envelope,
    encode_statement,
    key_id_of,
    pre_authentication_encoding,
)
from kelvin.contracts.wire import Wire
from kelvin.process.atomic_file import write_atomic

_SECRET: Final = 0o600
_OTHER_KEY: Final = (
    "restore it from a backup; without one, remove key and public half, and push again what has to be attested by this "
    "installation: the next start makes another key"
)


class BadKey(ValueError):
    """A file holds no usable key. The text says which file, and why."""


class Signer:
    """A private key that signs. Thread-safe."""

    def __init__(self, private: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> None:
        """Raises ValueError for a curve that is not supported."""
        self._private = private
        self.key_id = key_id_of(private.public_key())

    def __repr__(self) -> str:
        return f"<Signer {self.key_id}>"

    def sign(self, message: bytes) -> bytes:
        """Return the signature over `message`."""
        if isinstance(self._private, Ed25519PrivateKey):
            return self._private.sign(message)
        return self._private.sign(message, ec.ECDSA(SHA256()))

    def attest(self, version: str, kind: str, predicate: Wire) -> bytes:
        """Return the signed envelope of a statement about a version."""
        payload = encode_statement(version, kind, predicate)
        return encode_envelope(payload, self.key_id, self.sign(pre_authentication_encoding(payload)))


def load_signer(path: Path) -> Signer:
    """Load the key of a PEM file (PKCS #8, not encrypted). Raises BadKey."""
    try:
        private = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise BadKey(f"{path}: {error.strerror or error}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadKey(f"{path}: holds no private key in PEM that can be read without a password") from error
    if isinstance(private, Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
        try:
            return Signer(private)
        except ValueError as error:
            raise BadKey(f"{path}: {error}") from error
    raise BadKey(f"{path}: must be a key of {SUPPORTED_KEYS}")


def ensure_signer(secret: Path, public: Path) -> Signer:
    """Return the installation's own Ed25519 key, created if it does not exist. `public` gets its public half. Raises
    BadKey, OSError.
    """
    if not secret.exists() and public.exists():
        raise BadKey(f"{public.name} is there, its key {secret.name} is not: {_OTHER_KEY}")
    if not secret.exists():
        private = Ed25519PrivateKey.generate()
        write_atomic(secret, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), _SECRET)
    try:
        signer = load_signer(secret)
    except BadKey as bad:
        raise BadKey(f"{bad}: {_OTHER_KEY}") from bad
    pem = signer._private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    if not public.exists() or public.read_bytes() != pem:
        write_atomic(public, pem, 0o644)
    return signer
