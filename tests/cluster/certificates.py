"""A certificate for a server on this machine, which signs itself: in-cluster clients speak TLS alone."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def certified(host: str, directory: Path) -> tuple[ssl.SSLContext, bytes]:
    """The server's side, and the PEM that a client trusts. The key lies in the directory."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    begins = datetime.now(UTC) - timedelta(hours=1)
    alternatives = x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))])
    usage = x509.KeyUsage(True, False, False, False, False, True, False, False, False)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(alternatives, critical=False)
        .sign(key, SHA256())
    )
    pem = certificate.public_bytes(Encoding.PEM)
    path = directory / "api-server.pem"
    path.write_bytes(pem + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context, pem
