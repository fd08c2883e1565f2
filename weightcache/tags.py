"""Bytes that were verified once are recognised again at the rate of memory: by a tag under a key nobody else has.

AES-GMAC (NIST SP 800-38D), 128 bits, over what was just compared with its BLAKE3 digest; where the same file is read
again its tag is compared instead. Other bytes of up to 1 GiB have the same tag with a probability of less than 2^-100,
whoever made them: the key is drawn for this process, and leaves it as little as the tags do. It costs a core a third of
what BLAKE3 does (`python -m tests.weightcache.bench` prints both).
"""

import hmac
import secrets
from enum import StrEnum
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_BYTES: Final = 2**31 - 1  # the library's limit; longer chunks have no tag, and are hashed each time
_KEY_BYTES: Final = 16
_NONCE_DIGITS: Final = 24  # 96 bits


class Recheck(StrEnum):
    """What a file that was hashed once is compared with when it is read again."""

    TAG = "tag"
    DIGEST = "digest"


class Tags:
    """Tags of one process: another one's say nothing here."""

    def __init__(self) -> None:
        self._cipher = AESGCM(secrets.token_bytes(_KEY_BYTES))

    def of(self, data: memoryview, digest: str) -> bytes:
        """16 bytes, of at most `MAX_BYTES`. The nonce is of the chunk's own `digest` (hex). Releases the GIL."""
        return self._cipher.encrypt(bytes.fromhex(digest[:_NONCE_DIGITS]), b"", data)

    def matches(self, data: memoryview, digest: str, tag: bytes) -> bool:
        """Whether these are the bytes that the tag was taken of."""
        return hmac.compare_digest(self.of(data, digest), tag)
