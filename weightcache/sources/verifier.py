"""Hold a chunk's bytes against its digest, or against the tag that was taken when they were; what is faulty is counted.

Every source that is read for the host tier or NVMe is compared here.

A tag recognises bytes that were verified once at the rate of memory. It is AES-GMAC (NIST SP 800-38D), 128 bits, over
what was just compared with its BLAKE3 digest; where the same file is read again its tag is compared instead. Other
bytes of up to 1 GiB have the same tag with a probability of less than 2^-100, whoever made them: the key is drawn for
this process, and leaves it as little as the tags do. It costs a core a third of what BLAKE3 does
(`python -m tests.weightcache.bench` prints both).
"""

import hmac
import secrets
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kelvin.process.thread_calls import run_uncancellable
from weightcache.counters import Counters
from weightcache.sources.policy.healing import FAULTS, ReadOutcome
from weightcache.sources.source import Source, Verify

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

    def compute_tag(self, data: memoryview, digest: str) -> bytes:
        """16 bytes, of at most `MAX_BYTES`. The nonce is of the chunk's own `digest` (hex). Releases the GIL."""
        return self._cipher.encrypt(bytes.fromhex(digest[:_NONCE_DIGITS]), b"", data)

    def matches(self, data: memoryview, digest: str, tag: bytes) -> bool:
        """Whether these are the bytes that the tag was taken of."""
        return hmac.compare_digest(self.compute_tag(data, digest), tag)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`VERIFIED` or `DIGEST`; the tag of what was hashed just now, and was right; or that it was recognised."""

    outcome: ReadOutcome
    tag: bytes | None = None
    recognised: bool = False


class Verifier:
    """One for all who read chunks. `verify` says whether bytes are a digest's; without `tags` it is asked each time."""

    def __init__(self, threads: Executor, verify: Verify, counters: Counters, tags: Tags | None = None) -> None:
        self._threads = threads
        self._verify = verify
        self._counters = counters
        self._tags = tags

    def compare(self, data: memoryview, digest: str, tag: bytes | None = None) -> Verdict:
        """In a thread: whether these are the bytes that had the tag; without one, hash them. What is right gets its tag
        at once then, before anything can change it.
        """
        if self._tags is not None and tag is not None:
            is_known = self._tags.matches(data, digest, tag)
            return Verdict(ReadOutcome.VERIFIED, recognised=True) if is_known else Verdict(ReadOutcome.DIGEST)
        if not self._verify(data, digest):
            return Verdict(ReadOutcome.DIGEST)
        if self._tags is None or data.nbytes > MAX_BYTES:
            return Verdict(ReadOutcome.VERIFIED)
        return Verdict(ReadOutcome.VERIFIED, self._tags.compute_tag(data, digest))

    async def compare_in_thread(self, data: memoryview, digest: str, tag: bytes | None = None) -> Verdict:
        """As `compare`, in a hashing thread. Nothing reads them any more when this returns or is cancelled."""
        return await run_uncancellable(self._threads, self.compare, data, digest, tag)

    async def is_right(self, data: memoryview, digest: str) -> bool:
        """Return whether the bytes have that digest, for callers without tags. On return or cancellation no thread
        reads them any more.
        """
        return await run_uncancellable(self._threads, self._verify, data, digest)

    async def check(
        self, source: Source, outcome: ReadOutcome, tenant: str, digest: str, data: memoryview
    ) -> ReadOutcome:
        """What a read of the source's copy came to, now that `data` is compared where nobody did. A copy with a fault
        is not offered again, where that is in the source's power.
        """
        if outcome is ReadOutcome.WHOLE and not await self.is_right(data, digest):
            outcome = ReadOutcome.DIGEST
        if outcome in FAULTS:
            self._counters.chunk_faults[source.tier][outcome] += 1
            await source.quarantine(tenant, digest)
        return outcome
