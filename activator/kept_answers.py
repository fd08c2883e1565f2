"""Where answers are kept for their keys, and who is at work on one: the interface, and this process's own memory."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from activator.policy.once import Asked, Kept, OnceLimits, Shelf

TIDY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Mine:
    """Whoever claimed it runs the request, and publishes or releases. `token` tells this claim from others; where it
    `is_alone`, others could not be asked, and may run the same."""

    token: bytes = b""
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another activator runs it."""

    fingerprint: bytes
    retry_after_s: float


Claim = Mine | Kept | Elsewhere


class KeptAnswers(Protocol):
    """Bounded in time: a call that can't be answered soon is answered as if nothing were kept, and nobody else ran."""

    async def claim(self, asked: Asked) -> Claim:
        """Once for a run. Within one process runs of one name never overlap; the caller sees to that.

        Cancelled, it may leave a claim behind, which ends by itself.
        """
        ...

    async def publish(self, asked: Asked, mine: Mine, sealed: bytes) -> None:
        """Keep the answer, and end the claim. What is too large is not kept."""
        ...

    async def release(self, asked: Asked, mine: Mine) -> None:
        """End the claim with nothing kept. Of a claim that is not there any more, nothing."""
        ...


class OwnAnswers:
    """In this process, for one activator. Used on one event loop."""

    def __init__(self, limits: OnceLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.shelf = Shelf(limits)
        self._clock = clock

    def __repr__(self) -> str:
        return f"<OwnAnswers {self.shelf!r}>"

    async def claim(self, asked: Asked) -> Claim:
        """Never `Elsewhere`."""
        return self.shelf.find(asked.tenant, asked.name, self._clock()) or Mine()

    async def publish(self, asked: Asked, mine: Mine, sealed: bytes) -> None:
        """At once."""
        self.shelf.put(asked.tenant, asked.name, Kept(asked.fingerprint, sealed), self._clock())

    async def release(self, asked: Asked, mine: Mine) -> None:
        """There is nothing to end."""

    async def run(self) -> None:
        """Forget what has ended, also while nobody asks."""
        while True:
            await asyncio.sleep(TIDY_S)
            self.shelf.tidy(self._clock())
