"""Retries around any store: each attempt has a time limit, each call a number of attempts, each pause jitter."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from blobstore.store import BlobStat, BlobStore, BlobUnavailable, Payload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """`attempts` tries of at most `attempt_s` seconds; the nth pause is up to `base_s * 2^n`, never above `cap_s`."""

    attempts: int = 4
    attempt_s: float = 30.0
    base_s: float = 0.05
    cap_s: float = 2.0

    def pause_s(self, failed: int, chance: float) -> float:
        """Full jitter after `failed` (1 or more) failed attempts; `chance` is uniform in [0, 1)."""
        return chance * min(self.cap_s, self.base_s * 2.0 ** (failed - 1))


DEFAULT_BUDGET: Final = RetryBudget()


class RetryingStore:
    """Repeats what failed with `BlobUnavailable` or took too long; every other error passes at once.

    A put of an iterator is tried once, without a time limit, as its pieces are gone after the first attempt. A put
    whose answer was lost may report False for an object that it made itself: names are digests, so nothing is wrong.
    """

    def __init__(
        self,
        inner: BlobStore,
        budget: RetryBudget = DEFAULT_BUDGET,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._inner = inner
        self._budget = budget
        self._sleep = sleep
        self._chance = chance

    def __repr__(self) -> str:
        return f"<RetryingStore attempts={self._budget.attempts} {self._inner!r}>"

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        """See `BlobStore`."""
        if not isinstance(data, bytes):
            return await self._inner.put_if_absent(key, data)
        return await self._repeated(lambda: self._inner.put_if_absent(key, data))

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `BlobStore`."""
        return await self._repeated(lambda: self._inner.read(key, offset, length))

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        """See `BlobStore`."""
        await self._repeated(lambda: self._inner.read_into(key, offset, into))

    async def stat(self, key: str) -> BlobStat:
        """See `BlobStore`."""
        return await self._repeated(lambda: self._inner.stat(key))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        """See `BlobStore`. A broken listing starts again and skips what was already handed out."""
        last: str | None = None
        failed = 0
        while True:
            try:
                async for key in self._inner.list(prefix):
                    if last is None or key > last:
                        last, failed = key, 0  # progress renews the budget, or a long listing could not end
                        yield key
                return
            except BlobUnavailable:
                failed += 1
                if failed >= self._budget.attempts:
                    raise
            await self._pause(failed)

    async def delete(self, key: str) -> None:
        """See `BlobStore`."""
        await self._repeated(lambda: self._inner.delete(key))

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        failed = 0
        while True:
            try:
                return await self._attempt(call)
            except BlobUnavailable:
                failed += 1
                if failed >= self._budget.attempts:
                    raise
            await self._pause(failed)

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._budget.attempt_s):
                return await call()
        except TimeoutError as error:
            raise BlobUnavailable(f"no answer within {self._budget.attempt_s:g} s") from error

    async def _pause(self, failed: int) -> None:
        await self._sleep(self._budget.pause_s(failed, self._chance()))
