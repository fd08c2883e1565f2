"""The interface of a tier that chunks are read from. A source fetches; `fetcher.py` verifies what it fetched."""

from collections.abc import Callable
from typing import Final, Protocol

from blake3 import blake3

from weightcache.sources.policy.fair_read_queue import ReadLimit
from weightcache.sources.policy.healing import ReadOutcome

Verify = Callable[[memoryview, str], bool]


class ReadSlot(Protocol):
    """A chunk's turn at a source that may be read in parts. See `read_scheduler.py`."""

    async def part(self, nbytes: int) -> int:
        """Wait for the turn of the next part. Return how many of the next `nbytes` may be read now, at least one."""

    def record_arrival(self, nbytes: int) -> None:
        """Record that `nbytes` have arrived, so that other reads may begin."""


class UnlimitedReadSlot:
    """A `ReadSlot` that never waits."""

    async def part(self, nbytes: int) -> int:
        """Return `nbytes`."""
        return nbytes

    def record_arrival(self, nbytes: int) -> None:
        """Do nothing."""


UNLIMITED_READ_SLOT: Final[ReadSlot] = UnlimitedReadSlot()


class Source(Protocol):
    """One tier below the host's."""

    @property
    def tier(self) -> str:
        """Its name in counters and in failures."""

    @property
    def attempts(self) -> int:
        """How often it is read before the next source is asked. It is more than 1 if a bad read may have another
        cause than the copy, and the copy stays where it is.
        """

    @property
    def room(self) -> ReadLimit:
        """Its limit on what is read at once."""

    def may_have(self, tenant: str, digest: str) -> bool:
        """Return False if it certainly has no copy, known without I/O: such a chunk waits for no turn here."""

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, turn: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """Fill `into` (page-aligned, whole pages), in parts as `turn` has it where the source is read in parts. Raises
        `Refused(Unavailable)`, which says nothing about the bytes.

        When this returns, raises or is cancelled, nothing writes to `into` any more.
        """

    async def quarantine(self, tenant: str, digest: str) -> None:
        """Never offer this faulty copy again, if the source can prevent that. Raises nothing."""


def is_digest_of(data: memoryview, digest: str) -> bool:
    """Whether BLAKE3 of the bytes is `digest`. Releases the GIL; other threads of the library stay asleep."""
    return blake3(data, max_threads=1).hexdigest() == digest
