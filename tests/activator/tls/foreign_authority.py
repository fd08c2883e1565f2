"""A foreign certificate authority, such as an ACME server or a company's own."""

import datetime
import ssl
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS: Final = 30


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Issuer:
    """A certificate authority that writes key pairs into directories."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder("elsewhere", self._key)
        self._root = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(
            self._key, hashes.SHA256()
        )

    @property
    def root(self) -> bytes:
        """Its own certificate, which has no host name."""
        return self._root.public_bytes(serialization.Encoding.PEM)

    def client(self) -> ssl.SSLContext:
        """Return a client context that trusts this authority only."""
        return ssl.create_default_context(cadata=self._root.public_bytes(serialization.Encoding.PEM).decode())

    def pair(
        self,
        place: Path,
        *names: str,
        acme: bool = False,
        days: int = DAYS,
        begins_in_days: int = -1,
        repeats_names: bool = False,
    ) -> int:
        """Write a new certificate for these names and its key, replacing old ones. Return its serial number. With
        `repeats_names` it has two name extensions, which is malformed.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(names[0], key, days, begins_in_days).add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        if repeats_names:
            builder._extensions.append(builder._extensions[0])  # the builder's methods refuse a second one
        certificate = builder.sign(self._key, hashes.SHA256())
        chain = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in (certificate, self._root))
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        place.mkdir(parents=True, exist_ok=True)
        (place / ("privkey.pem" if acme else "tls.key")).write_bytes(pem)
        (place / ("fullchain.pem" if acme else "tls.crt")).write_bytes(chain)
        return certificate.serial_number

    def _builder(
        self, name: str, key: ec.EllipticCurvePrivateKey, days: int = DAYS, begins_in_days: int = -1
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name("elsewhere"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=begins_in_days))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
