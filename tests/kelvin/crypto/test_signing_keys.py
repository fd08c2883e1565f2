"""Key files are checked, the installation's own key is created once, and trust roots are read strictly."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from kelvin.contracts.artifacts.attestation import is_signed_by
from kelvin.contracts.setting_parser import BadSetting
from kelvin.crypto.signing_keys import BadKey, ensure_signer, load_signer
from kelvin.crypto.trust_roots import INSTALLATION, PUBLIC_FILE, SECRET_FILE, Trust, read_trust

Private = Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def pem_of(private: Private, password: bytes | None = None) -> bytes:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def public_pem_of(private: Private) -> bytes:
    return private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    "private",
    [
        pytest.param(Ed25519PrivateKey.generate(), id="ed25519"),
        pytest.param(ec.generate_private_key(ec.SECP256R1()), id="p-256"),
    ],
)
def test_signature_verifies_with_its_key_id(tmp_path: Path, private: Private) -> None:
    """A signature verifies under the key id of its signer, for the signed message only."""
    (tmp_path / "key.pem").write_bytes(pem_of(private))
    signer = load_signer(tmp_path / "key.pem")
    signature = signer.sign(b"message")
    assert is_signed_by(signer.key_id, b"message", signature)
    assert not is_signed_by(signer.key_id, b"massage", signature)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        pytest.param(None, "No such file", id="no file"),
        pytest.param(b"", "holds no private key", id="nothing"),
        pytest.param(public_pem_of(Ed25519PrivateKey.generate()), "holds no private key", id="a public key"),
        pytest.param(pem_of(Ed25519PrivateKey.generate(), b"word"), "without a password", id="a key under a password"),
        pytest.param(pem_of(ec.generate_private_key(ec.SECP384R1())), "P-256", id="another curve"),
        pytest.param(pem_of(rsa.generate_private_key(65537, 2048)), "Ed25519", id="RSA"),
    ],
)
def test_invalid_key_file_is_refused(tmp_path: Path, content: bytes | None, rule: str) -> None:
    """The refusal names the file and the rule."""
    path = tmp_path / "key.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadKey, match=rule) as caught:
        load_signer(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_the_own_key_is_made_once(tmp_path: Path) -> None:
    """The key is created once, readable only by its owner. A missing public half is written again."""
    secret, public = tmp_path / "data" / SECRET_FILE, tmp_path / "data" / PUBLIC_FILE
    signer = ensure_signer(secret, public)
    assert secret.stat().st_mode & 0o777 == 0o600
    public.unlink()
    assert ensure_signer(secret, public).key_id == signer.key_id
    assert read_trust(tmp_path / "data", tmp_path / "trust").name_of(signer.key_id) == INSTALLATION
    assert {path.name for path in (tmp_path / "data").iterdir()} == {SECRET_FILE, PUBLIC_FILE}


@pytest.mark.parametrize("content", [None, b"", bytes(119), b"-----BEGIN PRIVATE KEY-----\nMC4CAQ"])
def test_a_damaged_own_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """A missing, empty, zeroed or truncated key is not replaced by a new one. The error says what to do."""
    secret, public = tmp_path / SECRET_FILE, tmp_path / PUBLIC_FILE
    ensure_signer(secret, public)
    before = public.read_bytes()
    secret.unlink()
    if content is not None:
        secret.write_bytes(content)
    with pytest.raises(BadKey, match=rf"{SECRET_FILE}.*: restore it from a backup"):
        ensure_signer(secret, public)
    assert (secret.read_bytes() if secret.exists() else None, public.read_bytes()) == (content, before)


def test_the_own_key_may_come_later(tmp_path: Path) -> None:
    """A process may read the trust roots before the installation's own key exists."""
    trust = Trust(own_file=tmp_path / PUBLIC_FILE)
    stranger = ensure_signer(tmp_path / "other.key", tmp_path / "other.pub")
    assert trust.name_of(stranger.key_id) is None
    signer = ensure_signer(tmp_path / SECRET_FILE, tmp_path / PUBLIC_FILE)
    assert trust.name_of(signer.key_id) == INSTALLATION
    assert not trust.is_root(signer.key_id)
    assert trust.name_of(stranger.key_id) is None


def test_every_pem_file_is_a_trust_root(tmp_path: Path) -> None:
    """Each PEM file of the directory is a trust root named after it. A file without a key is refused by name."""
    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pem").write_bytes(pem_of(private))
    key_id = load_signer(tmp_path / "key.pem").key_id
    roots = tmp_path / "trust"
    assert read_trust(tmp_path, roots).name_of(key_id) is None
    roots.mkdir()
    (roots / "release.pem").write_bytes(public_pem_of(private))
    trust = read_trust(tmp_path, roots)
    assert trust.is_root(key_id)
    assert trust.name_of(key_id) == "release"
    (roots / "broken.pem").write_bytes(b"-----BEGIN")
    with pytest.raises(BadSetting, match=r"broken\.pem must hold a public key"):
        read_trust(tmp_path, roots)
