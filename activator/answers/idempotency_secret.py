"""The installation's secret behind `Idempotency-Key`, and what is sealed with it.

One file, made by the activator that starts first, shared by all that serve one installation: with another one they
would name the same request differently, and bill it twice.
"""

import secrets
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from activator.answers.idempotency_policy import AnswerKey
from activator.http.exchange import Headers
from kelvin.process.atomic_file import pending_file

NAME: Final = "once.key"  # in the data directory
_BYTES: Final = 32
_NONCE: Final = 12  # of GCM (NIST SP 800-38D): random, as a tenant's key seals far less than 2^32 answers
_PURPOSE: Final = b"kelvin kept answer 1 "


class BadIdempotencySecret(ValueError):
    """The file holds something else; it is never overwritten. The text says nothing of its content."""


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """An answer as it was handed out, and the request that made it."""

    request_id: str
    status: int
    headers: Headers
    body: bytes


_content: Final = msgspec.msgpack.Decoder(StoredResponse)


def ensure_idempotency_secret(path: Path) -> bytes:
    """The secret in `path`, made now where there is none. Raises BadIdempotencySecret, OSError."""
    try:
        text = path.read_text("latin-1").strip()
    except FileNotFoundError:
        with pending_file(path, 0o600) as draft:
            draft.file.write(secrets.token_hex(_BYTES).encode() + b"\n")
            with suppress(FileExistsError):  # another activator has made it meanwhile
                draft.commit(replace=False)
        text = path.read_text("latin-1").strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _BYTES:
        what = "restore it from a backup, or remove it: what was asked before then runs again where it is repeated"
        raise BadIdempotencySecret(f"{path.name}: must hold {_BYTES * 2} hex digits; {what}")
    return key


class Sealer:
    """AES-256-GCM under a key per tenant (HKDF, RFC 5869): no answer opens as another tenant's, or by another name."""

    def __init__(self, secret: bytes) -> None:
        self._of = lru_cache(maxsize=1024)(lambda tenant: AESGCM(_derived(secret, tenant)))

    def __repr__(self) -> str:
        return "<Sealer>"

    def seal(self, asked: AnswerKey, content: StoredResponse) -> bytes:
        """The answer as it may lie anywhere."""
        nonce = secrets.token_bytes(_NONCE)
        plain = msgspec.msgpack.encode(content)
        return nonce + self._of(asked.tenant).encrypt(nonce, plain, asked.name + asked.fingerprint)

    def open(self, asked: AnswerKey, sealed: bytes) -> StoredResponse | None:
        """None for what was not sealed so: for another tenant, name or request, or with another secret."""
        try:
            plain = self._of(asked.tenant).decrypt(sealed[:_NONCE], sealed[_NONCE:], asked.name + asked.fingerprint)
            return _content.decode(plain)
        except (InvalidTag, ValueError, msgspec.MsgspecError):
            return None


def _derived(secret: bytes, tenant: str) -> bytes:
    return HKDF(hashes.SHA256(), 32, None, _PURPOSE + tenant.encode()).derive(secret)
