"""The installation's secret for `Idempotency-Key`, and sealing of kept answers with it.

The secret is one file, created by the first activator and shared by all activators of an installation. Activators with
different secrets would give one request different names, and bill it twice.
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

SECRET_FILE: Final = "once.key"  # in the data directory
_BYTES: Final = 32
_NONCE: Final = 12  # random GCM nonce (NIST SP 800-38D): a tenant's key seals far less than 2^32 answers
_PURPOSE: Final = b"kelvin kept answer 1 "


class BadIdempotencySecret(ValueError):
    """The secret file has invalid content. It is never overwritten. The message does not reveal the content."""


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response as it was sent, and the id of the request that produced it."""

    request_id: str
    status: int
    headers: Headers
    body: bytes


_content: Final = msgspec.msgpack.Decoder(StoredResponse)


def ensure_idempotency_secret(path: Path) -> bytes:
    """Return the secret in `path`; create it if there is none. Raises BadIdempotencySecret, OSError."""
    try:
        text = path.read_text("latin-1").strip()
    except FileNotFoundError:
        with pending_file(path, 0o600) as draft:
            draft.file.write(secrets.token_hex(_BYTES).encode() + b"\n")
            with suppress(FileExistsError):  # another activator has just created it
                draft.commit(replace=False)
        text = path.read_text("latin-1").strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _BYTES:
        remedy = "restore it from a backup, or delete it. Repeats of earlier keys will then run and be billed again"
        raise BadIdempotencySecret(f"{path.name}: must hold {_BYTES * 2} hex digits; {remedy}")
    return key


class Sealer:
    """AES-256-GCM with a key per tenant (HKDF, RFC 5869). An answer opens only for its own tenant, name and request."""

    def __init__(self, secret: bytes) -> None:
        self._cipher = lru_cache(maxsize=1024)(lambda tenant: AESGCM(_derived(secret, tenant)))

    def __repr__(self) -> str:
        return "<Sealer>"

    def seal(self, answer_key: AnswerKey, content: StoredResponse) -> bytes:
        """Encrypt an answer. The result may be stored anywhere."""
        nonce = secrets.token_bytes(_NONCE)
        plain = msgspec.msgpack.encode(content)
        return nonce + self._cipher(answer_key.tenant).encrypt(nonce, plain, answer_key.name + answer_key.fingerprint)

    def open(self, answer_key: AnswerKey, sealed: bytes) -> StoredResponse | None:
        """Decrypt an answer. Return None if tenant, name, request or secret differ from those it was sealed with."""
        try:
            plain = self._cipher(answer_key.tenant).decrypt(
                sealed[:_NONCE], sealed[_NONCE:], answer_key.name + answer_key.fingerprint
            )
            return _content.decode(plain)
        except (InvalidTag, ValueError, msgspec.MsgspecError):
            return None


def _derived(secret: bytes, tenant: str) -> bytes:
    return HKDF(hashes.SHA256(), 32, None, _PURPOSE + tenant.encode()).derive(secret)
