"""Mutual TLS between machines that share one secret. A handshake with any other machine fails.

Each process derives the same certificate authority from the secret (Ed25519, by HKDF, RFC 5869). It signs its own leaf
certificate in memory. So nothing is issued, renewed or looked up, and an operator distributes one small file. A
certificate proves that its holder is some node, not which one. Every holder of the secret may read what any node may.
"""

import datetime
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kelvin.crypto.pem_certificates import load_pair

MIN_SECRET_CHARACTERS: Final = 32
MAX_SECRETS: Final = 4
_PURPOSE: Final = b"kelvin nodes 1"
# Fixed dates, because machine clocks differ and the secret has no date
_BEGIN: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END: Final = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


def read_secrets(path: Path) -> tuple[bytes, ...]:
    """Read secrets, one per line. The first is used, all are accepted, so that a new one can be distributed in advance.
    Raises ValueError, which never shows the content, and OSError.
    """
    if path.stat().st_mode & 0o007:
        raise ValueError("may be read by every user of this machine: chmod o-rwx")
    secrets = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    if not 1 <= len(secrets) <= MAX_SECRETS:
        raise ValueError(f"must hold 1 to {MAX_SECRETS} secrets, one a line")
    if any(len(secret) < MIN_SECRET_CHARACTERS for secret in secrets):
        raise ValueError(
            f"must hold secrets of {MIN_SECRET_CHARACTERS} characters or more, as `openssl rand -hex 32` makes"
        )
    return secrets


class NodeTls:
    """TLS contexts for both ends. Any number of connections may share one."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        authorities = [_authority_key(secret) for secret in secrets]
        self._leaf = _leaf(authorities[0])
        self._trusted = "".join(_certificate(key).public_bytes(Encoding.PEM).decode() for key in authorities)

    def __repr__(self) -> str:
        return "<NodeTls>"

    def server_context(self) -> ssl.SSLContext:
        """Return a context whose handshake fails for a client without a node's certificate."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """Return a context whose handshake fails for a server without a node's certificate."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the authority signs only nodes, and they are all alike
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._trusted)
        load_pair(context, self._leaf)
        return context


def _authority_key(secret: bytes) -> Ed25519PrivateKey:
    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _name(authority: Ed25519PrivateKey) -> x509.Name:
    """Return a name that is unique to the secret: a verifier looks up authorities by name."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(authority.public_key().public_bytes_raw())
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Kelvin nodes {digest.finalize().hex()[:16]}")])


def _certificate(authority: Ed25519PrivateKey) -> x509.Certificate:
    """Return the authority's certificate, which is the same on every machine."""
    public = authority.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(_name(authority))
        .issuer_name(_name(authority))
        .public_key(public)
        .serial_number(1)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(authority, None)
    )


def _leaf(authority: Ed25519PrivateKey) -> bytes:
    """Return a fresh key and its certificate as PEM, for either end of a connection."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")]))
        .issuer_name(_name(authority))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM) + private


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
