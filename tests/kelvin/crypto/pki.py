"""A test certificate authority and the leaf certificates that it signs, as files like those of cert-manager."""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kelvin.contracts.roles import Role
from kelvin.crypto.tls_identity import IdentityFiles

PREFIX: Final = "spiffe://kelvin/"
BOTH: Final = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
HOUR: Final = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A leaf certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A certificate authority with a new key."""

    def __init__(self, name: str = "one", ends_in: datetime.timedelta = HOUR) -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        built = self._builder(self._name, self._key.public_key(), ends_in)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.pem = built.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def sign(
        self,
        *uris: str,
        begins_in: datetime.timedelta = -2 * HOUR,
        ends_in: datetime.timedelta = HOUR,
        usages: tuple[x509.ObjectIdentifier, ...] = BOTH,
        name: str = "pod",
        repeats_names: bool = False,
    ) -> Pair:
        """Sign a leaf with this name and these URIs. With `repeats_names`, its names extension occurs twice."""
        key = ec.generate_private_key(ec.SECP256R1())
        built = self._builder(x509.Name([]), key.public_key(), ends_in, begins_in)
        names: list[x509.GeneralName] = [x509.DNSName(name), *map(x509.UniformResourceIdentifier, uris)]
        built = built.add_extension(x509.SubjectAlternativeName(names), critical=True)
        built = built.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if repeats_names:
            built._extensions.append(built._extensions[0])  # the builder's methods refuse a second one
        made = built.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        return Pair(made, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def of(self, role: Role) -> Pair:
        """Sign a valid leaf for `role`."""
        return self.sign(PREFIX + role)

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        ends_in: datetime.timedelta,
        begins_in: datetime.timedelta = -2 * HOUR,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins_in)
            .not_valid_after(now + ends_in)
        )


def write(place: Path, pair: Pair, *authorities: Authority) -> IdentityFiles:
    """Write a leaf, its key and the authorities to files."""
    place.mkdir(parents=True, exist_ok=True)
    files = IdentityFiles(place / "tls.crt", place / "tls.key", place / "ca.crt", PREFIX)
    for path, content in (
        (files.certificate, pair.certificate),
        (files.key, pair.key),
        (files.authorities, b"".join(each.pem for each in authorities)),
    ):
        draft = path.with_suffix(".draft")
        draft.write_bytes(content)
        draft.rename(path)
    return files
