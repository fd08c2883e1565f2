"""Where answers are kept for their keys, and who is at work on one: the interface, and this process's own memory."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from activator.policy.once import Asked, Kept, OnceLimits, Shelf, Shelved

TIDY_S: Final = 60.0
DECIDES_S: Final = 5.0  # how long a request with a key waits for the old activator to hand over
RETRY_S: Final = 1.0  # Retry-After where a key is in use elsewhere


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
    """Keeps answers by idempotency key. Every call returns within a bounded time.

    Activators that share a store claim a key as their own if the store can't be asked. Around a planned restart, a key
    that the old activator has not handed over in time counts as in use elsewhere.
    """

    async def claim(self, asked: Asked) -> Claim:
        """Claim the key for a run, or return its kept answer, or that another activator runs it.

        The caller makes sure that runs of one name never overlap in one process. If cancelled, it may leave a claim
        behind, which expires.
        """
        ...

    async def publish(self, asked: Asked, mine: Mine, sealed: bytes) -> None:
        """Keep the answer, and end the claim. What is too large is not kept."""
        ...

    async def release(self, asked: Asked, mine: Mine) -> None:
        """End the claim with nothing kept. Of a claim that is not there any more, nothing."""
        ...


class OwnAnswers:
    """Answers in this process's memory. Used on one event loop.

    Around a planned restart another activator may decide on keys: see `answers_handover.py`. Then a key that is not
    known here counts as in use elsewhere.
    """

    def __init__(self, limits: OnceLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.shelf = Shelf(limits)
        self._clock = clock
        self._elsewhere: dict[bytes, bytes] = {}  # key names whose requests run at the old activator -> fingerprints
        self.decides = asyncio.Event()  # cleared while the activator before this one decides
        self.decides.set()
        # Called when a claim of ours ends, with its kept answer if it has one. Set once the next activator decides.
        self.on_end: Callable[[Asked, Kept | None], None] | None = None

    def __repr__(self) -> str:
        return f"<OwnAnswers {self.shelf!r} elsewhere={len(self._elsewhere)} decides={self.decides.is_set()}>"

    async def claim(self, asked: Asked) -> Claim:
        """See `KeptAnswers`."""
        if not self.decides.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(DECIDES_S):
                    await self.decides.wait()
        if (kept := self.shelf.find(asked.tenant, asked.name, self._clock())) is not None:
            return kept
        if (fingerprint := self._elsewhere.get(asked.name)) is not None:
            return Elsewhere(fingerprint, RETRY_S)
        if self.on_end is not None or not self.decides.is_set():
            return Elsewhere(asked.fingerprint, RETRY_S)
        return Mine()

    async def publish(self, asked: Asked, mine: Mine, sealed: bytes) -> None:
        """See `KeptAnswers`. Returns at once."""
        kept = Kept(asked.fingerprint, sealed)
        self.shelf.put(asked.tenant, asked.name, kept, self._clock())
        if self.on_end is not None:
            self.on_end(asked, kept)

    async def release(self, asked: Asked, mine: Mine) -> None:
        """See `KeptAnswers`."""
        if self.on_end is not None:
            self.on_end(asked, None)

    def all(self) -> list[Shelved]:
        """Return all kept answers, the oldest first."""
        return self.shelf.all(self._clock())

    def inherit(self, tenant: str, name: bytes, kept: Kept, age_s: float) -> None:
        """Keep an answer that the old activator has kept for `age_s`."""
        self._elsewhere.pop(name, None)
        self.shelf.put(tenant, name, kept, self._clock() - age_s)

    def add_elsewhere(self, name: bytes, fingerprint: bytes) -> None:
        """Record that the key's request runs at the old activator."""
        self._elsewhere[name] = fingerprint

    def remove_elsewhere(self, name: bytes) -> None:
        """Record that it has ended there without an answer to keep."""
        self._elsewhere.pop(name, None)

    def end_handover(self) -> None:
        """Record that the old activator has gone, and runs nothing."""
        self._elsewhere.clear()
        self.decides.set()

    async def run(self) -> None:
        """Forget what has ended, also while nobody asks."""
        while True:
            await asyncio.sleep(TIDY_S)
            self.shelf.tidy(self._clock())
