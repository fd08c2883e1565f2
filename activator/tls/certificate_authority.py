"""The local CA, created once, and the leaf certificates that it signs, which are kept in memory only."""

import datetime
import ipaddress
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kelvin.crypto.pem_certificates import load_pair
from kelvin.process.atomic_file import write_atomic

CA_DAYS: Final = 3650
LEAF_DAYS: Final = 397
BACKDATED: Final = datetime.timedelta(hours=1)  # a client's clock may be behind ours
_RENEW_CA: Final = datetime.timedelta(days=90)  # before its expiry
_REMEDY: Final = (
    "restore both from a backup. Without one, remove both. The next start then makes a new CA, and every client must "
    "install the new ca.pem"
)
_NAME: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Kelvin local CA")])

log = logging.getLogger(__name__)


class BadCertificateAuthority(ValueError):
    """The CA's files can't be used. The message says which, why, and what to do. The files are never overwritten."""


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class CertificateAuthority:
    """Signs leaf certificates, dated by `now`. Its methods block."""

    def __init__(
        self,
        certificate: x509.Certificate,
        key: ec.EllipticCurvePrivateKey,
        path: Path,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        self.certificate = certificate
        self.now = now
        self._key = key
        self._path = path
        self._is_logged = False  # that writing the renewed certificate failed

    @classmethod
    def load_or_make(
        cls, certificate_path: Path, key_path: Path, now: Callable[[], datetime.datetime] = utc_now
    ) -> "CertificateAuthority":
        """Return the CA of these files. Create both if neither exists, or the certificate if only the key does. Raises
        BadCertificateAuthority, OSError.
        """
        if not key_path.exists() and not certificate_path.exists():
            _make_ca(certificate_path, key_path, now())
        elif not certificate_path.exists():
            # killed between writing the two
            write_atomic(certificate_path, _self_signed(_load_key(key_path), now()), 0o644)
        if not key_path.exists():
            raise BadCertificateAuthority(
                f"{certificate_path.name} is there, its key {key_path.name} is not: {_REMEDY}"
            )
        key = _load_key(key_path)
        certificate = _load_certificate(certificate_path)
        if certificate.public_key() != key.public_key():
            raise BadCertificateAuthority(
                f"{certificate_path.name} and {key_path.name} do not belong together: {_REMEDY}"
            )
        authority = cls(certificate, key, certificate_path, now)
        authority.renew_if_due()
        return authority

    def renew_if_due(self) -> None:
        """Renew the CA's certificate if it expires soon, or is not valid yet because the clock was ahead.

        Key and name stay, so leaves and older copies of the CA stay valid. A CA that Kelvin did not make is left alone.
        If the file can't be written, the old certificate stays.
        """
        now, certificate = self.now(), self.certificate
        is_good = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc - _RENEW_CA
        if is_good or not certificate.subject == certificate.issuer == _NAME:
            return
        pem = _self_signed(self._key, now)
        try:
            write_atomic(self._path, pem, 0o644)
        except OSError as error:
            if not self._is_logged:
                log.error("the CA's certificate is not valid and can't be made again", extra={"error": str(error)})
            self._is_logged = True
            return
        self.certificate, self._is_logged = x509.load_pem_x509_certificate(pem), False
        old_begin = str(certificate.not_valid_before_utc)
        log.warning("the CA's certificate was made again", extra={"was_to_begin": old_begin})

    def issue_context(self, names: list[str], addresses: list[str]) -> ssl.SSLContext:
        """Return a server context with a new leaf certificate for these DNS names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        alternatives += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        now = self.now()
        leaf = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(now + datetime.timedelta(days=LEAF_DAYS))
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return server_context(leaf.public_bytes(serialization.Encoding.PEM) + _pem(key))


def _make_ca(certificate_path: Path, key_path: Path, now: datetime.datetime) -> None:
    """Create the CA's files. The key is first, because a certificate without its key can't be repaired."""
    key = ec.generate_private_key(ec.SECP256R1())
    write_atomic(key_path, _pem(key), 0o600)
    write_atomic(certificate_path, _self_signed(key, now), 0o644)


def _self_signed(key: ec.EllipticCurvePrivateKey, now: datetime.datetime) -> bytes:
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def server_context(pem: bytes) -> ssl.SSLContext:
    """Return a server context with the key and chain in `pem`. Raises ssl.SSLError, also if they do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_pair(context, pem)
    return context


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key is encrypted
        raise BadCertificateAuthority(f"{path.name} holds no private key that can be read: {_REMEDY}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadCertificateAuthority(f"{path.name} does not hold an elliptic-curve key: {_REMEDY}")
    return key


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        remedy = (
            "restore it from a backup, or remove it: the next start makes it again from its key, for the same callers"
        )
        raise BadCertificateAuthority(f"{path.name} holds no certificate that can be read: {remedy}") from None
