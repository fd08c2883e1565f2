"""Compare a chunk's bytes with its digest, or with the tag of an earlier comparison. Faulty copies are counted.

Every read of a source for the host tier or NVMe is compared here.

A tag recognises bytes that were verified before, at memory speed. It is AES-GMAC (NIST SP 800-38D), 128 bits, over
bytes that were just compared with their BLAKE3 digest. When the same file is read again, its tag is compared instead.
Other bytes of up to 1 GiB have the same tag with a probability below 2^-100, even if an attacker made them. The key is
random for this process, and neither key nor tags leave it. A tag costs a third of the CPU time of BLAKE3 (`python -m
tests.weightcache.bench` prints both).
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

MAX_BYTES: Final = 2**31 - 1  # the library's limit; longer chunks have no tag, and are hashed at each read
_KEY_BYTES: Final = 16
_NONCE_DIGITS: Final = 24  # 96 bits


class Recheck(StrEnum):
    """The check at later reads of a file that was hashed once."""

    TAG = "tag"
    DIGEST = "digest"


class Tags:
    """Computes tags with this process's key. Tags of another process are meaningless here."""

    def __init__(self) -> None:
        self._cipher = AESGCM(secrets.token_bytes(_KEY_BYTES))

    def compute_tag(self, data: memoryview, digest: str) -> bytes:
        """Return the 16-byte tag of at most `MAX_BYTES`. The nonce comes from `digest` (hex). Releases the GIL."""
        return self._cipher.encrypt(bytes.fromhex(digest[:_NONCE_DIGITS]), b"", data)

    def matches(self, data: memoryview, digest: str, tag: bytes) -> bool:
        """Return whether the bytes have this tag."""
        return hmac.compare_digest(self.compute_tag(data, digest), tag)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`VERIFIED` or `DIGEST`. `tag` belongs to bytes that were just hashed and are correct.

    `is_recognised`: a tag matched.
    """

    outcome: ReadOutcome
    tag: bytes | None = None
    is_recognised: bool = False


class Verifier:
    """Verifies all chunks of the agent. `verify` compares bytes with a digest, at every read if there are no `tags`."""

    def __init__(self, threads: Executor, verify: Verify, counters: Counters, tags: Tags | None = None) -> None:
        self._threads = threads
        self._verify = verify
        self._counters = counters
        self._tags = tags

    def compare(self, data: memoryview, digest: str, tag: bytes | None = None) -> Verdict:
        """Compare the bytes with the tag, or without one with their digest. Correct hashed bytes get a tag. Call it in
        a thread. The tag is computed at once, before the bytes can change.
        """
        if self._tags is not None and tag is not None:
            is_known = self._tags.matches(data, digest, tag)
            return Verdict(ReadOutcome.VERIFIED, is_recognised=True) if is_known else Verdict(ReadOutcome.DIGEST)
        if not self._verify(data, digest):
            return Verdict(ReadOutcome.DIGEST)
        if self._tags is None or data.nbytes > MAX_BYTES:
            return Verdict(ReadOutcome.VERIFIED)
        return Verdict(ReadOutcome.VERIFIED, self._tags.compute_tag(data, digest))

    async def compare_in_thread(self, data: memoryview, digest: str, tag: bytes | None = None) -> Verdict:
        """Call `compare` in a hashing thread. Once this returns or is cancelled, no thread reads the bytes."""
        return await run_uncancellable(self._threads, self.compare, data, digest, tag)

    async def matches_digest(self, data: memoryview, digest: str) -> bool:
        """Return whether the bytes have that digest, without tags. Afterwards, no thread reads the bytes."""
        return await run_uncancellable(self._threads, self._verify, data, digest)

    async def verify_read(
        self, source: Source, outcome: ReadOutcome, tenant: str, digest: str, data: memoryview
    ) -> ReadOutcome:
        """Return the outcome of a read, after comparing bytes that the source did not compare. A faulty copy is
        counted, and quarantined if the source can do that.
        """
        if outcome is ReadOutcome.WHOLE and not await self.matches_digest(data, digest):
            outcome = ReadOutcome.DIGEST
        if outcome in FAULTS:
            self._counters.chunk_faults[source.tier][outcome] += 1
            await source.quarantine(tenant, digest)
        return outcome
