"""Make certificates for the length of a bench: for this host, and for processes of ours by role."""

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kelvin.contracts.roles import Role

PREFIX: Final = "spiffe://kelvin/"
_DAY: Final = datetime.timedelta(days=1)


def make_certificate(at: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate of this host in a new directory. Return `cert.pem` and `key.pem`."""
    at.mkdir()
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("localhost")
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    made = _builder(name, name, key.public_key()).add_extension(names, critical=False).sign(key, hashes.SHA256())
    chain, private = at / "cert.pem", at / "key.pem"
    chain.write_bytes(made.public_bytes(Encoding.PEM))
    private.write_bytes(_pem(key))
    return chain, private


def make_inner(at: Path, roles: Iterable[Role]) -> None:
    """Write `ROLE/tls.crt`, `tls.key` and `ca.crt` below `at`, as any PKI would. The CA's key is thrown away."""
    authority, name = ec.generate_private_key(ec.SECP256R1()), _name("bench")
    built = _builder(name, name, authority.public_key())
    ca = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    root = ca.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM)
    for role in roles:
        key = ec.generate_private_key(ec.SECP256R1())
        uri = x509.UniformResourceIdentifier(PREFIX + role)
        leaf = _builder(_name(role), name, key.public_key()).add_extension(
            x509.SubjectAlternativeName([uri]), critical=False
        )
        place = at / role
        place.mkdir(parents=True)
        (place / "ca.crt").write_bytes(root)
        (place / "tls.crt").write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM))
        (place / "tls.key").write_bytes(_pem(key))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), now - _DAY / 24, now + _DAY)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
