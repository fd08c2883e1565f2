"""The interface of a tier that chunks are read from. `verifier.py` verifies bytes that a source did not."""

from collections.abc import Callable
from typing import Final, Protocol

from blake3 import blake3

from weightcache.sources.policy.fair_read_queue import ReadLimit
from weightcache.sources.policy.healing import ReadOutcome

Verify = Callable[[memoryview, str], bool]


class ReadSlot(Protocol):
    """A chunk's slot at a source that may be read in parts. See `read_scheduler.py`."""

    async def request_part(self, nbytes: int) -> int:
        """Wait until the next part may be read. Return how many of the next `nbytes` may be read now, at least one."""

    def record_arrival(self, nbytes: int) -> None:
        """Record that `nbytes` have arrived, so that other reads may begin."""


class UnlimitedReadSlot:
    """A `ReadSlot` that never waits."""

    async def request_part(self, nbytes: int) -> int:
        return nbytes

    def record_arrival(self, nbytes: int) -> None:
        """Do nothing, because nothing waits."""


UNLIMITED_READ_SLOT: Final[ReadSlot] = UnlimitedReadSlot()


class Source(Protocol):
    """One tier below the host's."""

    @property
    def tier(self) -> str:
        """Return its name in counters and failures."""

    @property
    def attempts(self) -> int:
        """Return how often it is read before the next source. More than 1 if the next read may be good: a bad read may
        have another cause than the copy, or another node's copy is read.
        """

    @property
    def read_limit(self) -> ReadLimit:
        """Return its limit of concurrent reads."""

    def may_have(self, tenant: str, digest: str) -> bool:
        """Return False if it certainly has no copy, without I/O. Such a chunk does not wait for a slot here."""

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, slot: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """Fill `into` (page-aligned, whole pages), in parts as `slot` allows if the source is read in parts.

        Raises `Refused(Unavailable)`, which does not judge the bytes. Once this returns, raises or is cancelled,
        nothing writes to `into`.
        """

    async def quarantine(self, tenant: str, digest: str) -> None:
        """Never offer this faulty copy again, if the source can prevent that. Raises nothing."""


def is_digest_of(data: memoryview, digest: str) -> bool:
    """Return whether `digest` is the BLAKE3 digest of the bytes. Releases the GIL; uses no other threads."""
    return blake3(data, max_threads=1).hexdigest() == digest
