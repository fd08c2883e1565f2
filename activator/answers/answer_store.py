"""The store of kept answers: its interface, and the implementation in this process's memory. Idempotency keys and the
response cache each have their own store. They decide what is kept, under which name, and for how long.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from activator.answers.idempotency_policy import AnswerCache, AnswerKey, AnswerStoreLimits, KeptAnswer

MAINTAIN_S: Final = 3.0  # interval between calls of `AnswerStore.maintain`
HANDOVER_WAIT_S: Final = 5.0  # how long a request with a key waits for the old activator to hand over
RETRY_S: Final = 1.0  # Retry-After for a key that is in use elsewhere


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claimed name. The claimant runs the request, then publishes or releases. `token` identifies this claim. With
    `is_alone` the shared store was unavailable, so other activators may run the same request.
    """

    token: bytes = b""
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class ClaimedElsewhere:
    """Another activator runs the request."""

    fingerprint: bytes
    retry_after_s: float


ClaimResult = Claimed | KeptAnswer | ClaimedElsewhere


class AnswerStore(Protocol):
    """Keeps sealed answers by tenant and name, bounded in time and in bytes. Every call returns within a bounded time.

    Activators that share a store claim a name for themselves if the store is unavailable. During a planned restart, a
    name that the old activator has not handed over in time counts as in use elsewhere.
    """

    @property
    def nbytes(self) -> int:
        """Return the bytes of the answers kept in this process."""
        ...

    async def find(self, answer_key: AnswerKey) -> KeptAnswer | None:
        """Return the answer kept under the name, or None. Also None if the store is unavailable. Safe to cancel."""
        ...

    async def claim(self, answer_key: AnswerKey) -> ClaimResult:
        """Claim the name for a run, or return its kept answer, or report that another activator runs it.

        The caller ensures that runs of one name never overlap in one process. A cancelled call may leave a claim
        behind, which expires.
        """
        ...

    async def publish(self, answer_key: AnswerKey, claim: Claimed | None, sealed: bytes) -> None:
        """Keep the answer and end the claim. Without a claim, replace the kept answer. Too large answers are
        not kept.
        """
        ...

    async def release(self, answer_key: AnswerKey, claim: Claimed) -> None:
        """End the claim without keeping an answer. Does nothing if the claim has ended."""
        ...

    async def maintain(self) -> None:
        """Drop expired answers and renew claims. Call it every MAINTAIN_S."""
        ...


class LocalAnswerStore:
    """Answers in this process's memory. Use from one event loop. `clock` returns monotonic seconds.

    During a planned restart another activator may decide on keys: see `answers_handover.py`. Then a key that is unknown
    here counts as in use elsewhere.
    """

    def __init__(self, limits: AnswerStoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.cache = AnswerCache(limits)
        self._clock = clock
        self._old_runs: dict[bytes, bytes] = {}  # key names whose requests run at the old activator -> fingerprints
        self.has_authority = asyncio.Event()  # cleared while the old activator decides on keys
        self.has_authority.set()
        # Called when a claim of this process ends, with its kept answer if any. Set once the next activator decides.
        self.on_claim_ended: Callable[[AnswerKey, KeptAnswer | None], None] | None = None

    def __repr__(self) -> str:
        return f"<LocalAnswerStore {self.cache!r} old_runs={len(self._old_runs)} decides={self.has_authority.is_set()}>"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all kept answers, including ENTRY_BYTES each."""
        return self.cache.nbytes

    async def find(self, answer_key: AnswerKey) -> KeptAnswer | None:
        """Return the answer kept under the name, or None. Does not wait."""
        return self.cache.find(answer_key.tenant, answer_key.name, self._clock())

    async def claim(self, answer_key: AnswerKey) -> ClaimResult:
        """Claim the name. First waits up to HANDOVER_WAIT_S for the old activator to hand over."""
        if not self.has_authority.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(HANDOVER_WAIT_S):
                    await self.has_authority.wait()
        if (answer := await self.find(answer_key)) is not None:
            return answer
        if (fingerprint := self._old_runs.get(answer_key.name)) is not None:
            return ClaimedElsewhere(fingerprint, RETRY_S)
        if self.on_claim_ended is not None or not self.has_authority.is_set():
            return ClaimedElsewhere(answer_key.fingerprint, RETRY_S)
        return Claimed()

    async def publish(self, answer_key: AnswerKey, claim: Claimed | None, sealed: bytes) -> None:
        """Keep the answer and end the claim. Does not wait."""
        answer = KeptAnswer(answer_key.fingerprint, sealed)
        self.cache.put(answer_key.tenant, answer_key.name, answer, self._clock())
        if self.on_claim_ended is not None:
            self.on_claim_ended(answer_key, answer)

    async def release(self, answer_key: AnswerKey, claim: Claimed) -> None:
        """End the claim, and tell the next activator if one is connected."""
        if self.on_claim_ended is not None:
            self.on_claim_ended(answer_key, None)

    async def maintain(self) -> None:
        """Drop the expired answers."""
        self.cache.drop_expired(self._clock())

    def list_answers(self) -> list[tuple[str, bytes, KeptAnswer]]:
        """Return all kept answers with their tenants and names, the oldest first."""
        return self.cache.list_answers(self._clock())

    def inherit(self, tenant: str, name: bytes, answer: KeptAnswer) -> None:
        """Keep an answer of the old activator for the rest of its lifetime."""
        self._old_runs.pop(name, None)
        self.cache.put(tenant, name, answer, self._clock())

    def add_old_run(self, name: bytes, fingerprint: bytes) -> None:
        """Record that a key's request runs at the old activator."""
        self._old_runs[name] = fingerprint

    def remove_old_run(self, name: bytes) -> None:
        """Record that a key's request ended at the old activator without an answer to keep."""
        self._old_runs.pop(name, None)

    def end_handover(self) -> None:
        """Record that the old activator has gone and runs nothing."""
        self._old_runs.clear()
        self.has_authority.set()
