"""Where a chunk's bytes may come from, in order. A source only fetches: the fetcher verifies, whoever fetched."""

from collections.abc import Callable
from typing import Final, Protocol

from blake3 import blake3

from weightcache.policy.healing import Outcome
from weightcache.policy.sharing import Room

Verify = Callable[[memoryview, str], bool]


class Turn(Protocol):
    """A chunk's, at a source that is read in parts."""

    async def part(self, nbytes: int) -> int:
        """Of the next `nbytes` to be read so many may be now, at least one of them where there is one. Waits for it."""

    def came(self, nbytes: int) -> None:
        """So many bytes are there: others may begin."""


class AllAtOnce:
    """A `Turn` of who waits for none."""

    async def part(self, nbytes: int) -> int:
        """All of them."""
        return nbytes

    def came(self, nbytes: int) -> None:
        """Nobody was waiting."""


ALL_AT_ONCE: Final[Turn] = AllAtOnce()


class Source(Protocol):
    """One tier below the host's."""

    @property
    def tier(self) -> str:
        """Its name in counters and in failures."""

    @property
    def attempts(self) -> int:
        """How often a faulty copy is read before it is believed to be faulty: more than once where a bad read may be
        another's fault than the copy's, and the copy stays where it is.
        """

    @property
    def room(self) -> Room:
        """How much it is asked for at once."""

    def may_have(self, tenant: str, digest: str) -> bool:
        """False where it has no copy and knows it without asking anyone: such a chunk waits for no turn here."""

    async def fetch(self, tenant: str, digest: str, into: memoryview, turn: Turn = ALL_AT_ONCE) -> Outcome:
        """Fill `into` (page-aligned, whole pages), in parts as `turn` has it where the source is read in parts. Raises
        `Refused(Unavailable)`, which says nothing about the bytes.

        When this returns, raises or is cancelled, nothing writes to `into` any more.
        """

    async def quarantine(self, tenant: str, digest: str) -> None:
        """Its copy is faulty: never offer it again, where that is in its power. Raises nothing."""


def is_digest_of(data: memoryview, digest: str) -> bool:
    """Whether BLAKE3 of the bytes is `digest`. Releases the GIL; other threads of the library stay asleep."""
    return blake3(data, max_threads=1).hexdigest() == digest
