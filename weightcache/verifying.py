"""Hold a chunk's bytes against its digest, or against the tag that was taken when they were; what is faulty is counted.

Whoever reads a chunk asks here, and nobody else knows how bytes are compared.
"""

from concurrent.futures import Executor
from dataclasses import dataclass

from service.threads import to_the_end
from weightcache.counters import Counters
from weightcache.policy.healing import FAULTS, Outcome
from weightcache.sources import Source, Verify
from weightcache.tags import MAX_BYTES, Tags


@dataclass(frozen=True, slots=True)
class Verdict:
    """`VERIFIED` or `DIGEST`; the tag of what was hashed just now, and was right; or that it was recognised."""

    outcome: Outcome
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
            return Verdict(Outcome.VERIFIED, recognised=True) if is_known else Verdict(Outcome.DIGEST)
        if not self._verify(data, digest):
            return Verdict(Outcome.DIGEST)
        if self._tags is None or data.nbytes > MAX_BYTES:
            return Verdict(Outcome.VERIFIED)
        return Verdict(Outcome.VERIFIED, self._tags.of(data, digest))

    async def compared(self, data: memoryview, digest: str, tag: bytes | None = None) -> Verdict:
        """As `compare`, in a hashing thread. Nothing reads them any more when this returns or is cancelled."""
        return await to_the_end(self._threads, self.compare, data, digest, tag)

    async def is_right(self, data: memoryview, digest: str) -> bool:
        """Return whether the bytes have that digest, for callers without tags. On return or cancellation no thread
        reads them any more.
        """
        return await to_the_end(self._threads, self._verify, data, digest)

    async def check(self, source: Source, outcome: Outcome, tenant: str, digest: str, data: memoryview) -> Outcome:
        """What a read of the source's copy came to, now that `data` is compared where nobody did. A copy with a fault
        is not offered again, where that is in the source's power.
        """
        if outcome is Outcome.WHOLE and not await self.is_right(data, digest):
            outcome = Outcome.DIGEST
        if outcome in FAULTS:
            self._counters.chunk_faults[source.tier][outcome] += 1
            await source.quarantine(tenant, digest)
        return outcome
