"""The activator's CA is created once, kept private, and never silently replaced."""

import ssl
from pathlib import Path

import pytest

from activator.tls.certificate_authority import BadCertificateAuthority, CertificateAuthority
from tests.activator.tls.handshakes import handshake


def _load(path: Path) -> CertificateAuthority:
    return CertificateAuthority.load_or_make(path / "ca.pem", path / "tls" / "ca.key")


def test_ca_is_created_once(tmp_path: Path) -> None:
    """A second start loads the same CA. Only its owner can read the key."""
    first = _load(tmp_path).certificate
    assert _load(tmp_path).certificate == first
    assert (tmp_path / "tls" / "ca.key").stat().st_mode & 0o777 == 0o600


def test_missing_ca_certificate_is_recreated_from_its_key(tmp_path: Path) -> None:
    """A crash may leave the key without its certificate."""
    key = _load(tmp_path).certificate.public_key()
    (tmp_path / "ca.pem").unlink()
    assert _load(tmp_path).certificate.public_key() == key


def test_a_lost_or_strange_key_is_refused(tmp_path: Path) -> None:
    """Clients trust ca.pem, so a new CA would silently lock them out."""
    _load(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _load(other)
    (tmp_path / "tls" / "ca.key").write_bytes((other / "tls" / "ca.key").read_bytes())
    with pytest.raises(BadCertificateAuthority, match="do not belong together"):
        _load(tmp_path)
    (tmp_path / "tls" / "ca.key").unlink()
    with pytest.raises(BadCertificateAuthority, match=r"its key ca\.key is not"):
        _load(tmp_path)


@pytest.mark.parametrize("damaged", ["ca.pem", "tls/ca.key"])
@pytest.mark.parametrize("content", [b"", b"\0" * 241, b"half"], ids=["empty", "zeroed", "torn"])
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, damaged: str, content: bytes) -> None:
    """The error names the file and the remedy. Neither file is written."""
    _load(tmp_path)
    path = tmp_path / damaged
    path.write_bytes(path.read_bytes()[:100] if content == b"half" else content)
    before = [(tmp_path / name).read_bytes() for name in ("ca.pem", "tls/ca.key")]
    with pytest.raises(BadCertificateAuthority, match=rf"{path.name} holds no .* that can be read: restore .* remove"):
        _load(tmp_path)
    assert [(tmp_path / name).read_bytes() for name in ("ca.pem", "tls/ca.key")] == before


def test_a_leaf_satisfies_strict_verification(tmp_path: Path) -> None:
    """Python's strict mode (RFC 5280) accepts the chain and the names."""
    server = _load(tmp_path).issue_context(["localhost", "*.t.d.e"], ["127.0.0.1", "::1"])
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    for name in ("localhost", "m.t.d.e", "127.0.0.1", "::1"):
        handshake(client, server, name)
    for name in ("elsewhere", "a.m.t.d.e", "127.0.0.2"):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(client, server, name)
