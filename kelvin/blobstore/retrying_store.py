"""Retries around any store. Each attempt has a time limit, each call a number of attempts, each pause jitter."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kelvin.blobstore.blob_store import BlobStat, BlobStore, BlobUnavailable, Payload
from kelvin.contracts.backoff import ExponentialBackoff

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """Limits of the attempts of a call.

    There are at most `attempts`. Each may take `attempt_s` seconds, plus the time for its bytes at
    `slowest_bytes_per_s`. The pause after the nth failure is up to `base_s * 2^(n-1)` seconds, at most `cap_s`.
    """

    attempts: int = 4
    attempt_s: float = 30.0
    base_s: float = 0.05
    cap_s: float = 2.0
    slowest_bytes_per_s: float = float(1 << 20)

    def limit_s(self, size: int) -> float:
        """Return how many seconds one attempt that moves `size` bytes may take."""
        return self.attempt_s + size / self.slowest_bytes_per_s

    def pause_s(self, failures: int, jitter: float) -> float:
        """Return the pause in seconds after `failures` (1 or more) failures. Full jitter: `jitter` is in [0, 1)."""
        return jitter * ExponentialBackoff(self.base_s, self.cap_s).delay_s(failures)


DEFAULT_BUDGET: Final = RetryBudget()


class Retry:
    """Repeats a call that raised `BlobUnavailable` or took too long, within a budget. Raises other errors at once."""

    def __init__(
        self,
        budget: RetryBudget = DEFAULT_BUDGET,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.budget = budget
        self._sleep = sleep
        self._jitter = jitter

    def __repr__(self) -> str:
        return f"<Retry attempts={self.budget.attempts}>"

    async def __call__(
        self, call: Callable[[], Awaitable[T]], size: int = 0, stat: Callable[[], Awaitable[BlobStat]] | None = None
    ) -> T:
        """Return the result of the first attempt that succeeds. `size` is the number of bytes that one attempt moves.

        If the size is unknown before, `stat` finds it after a failure. Raises `BlobUnavailable` after the last attempt,
        also if that attempt took too long.
        """
        failed = 0
        while True:
            try:
                if failed and stat is not None:
                    size = (await self.attempt(stat)).size
                return await self.attempt(call, size)
            except BlobUnavailable:
                failed += 1
                if failed >= self.budget.attempts:
                    raise
            await self.pause(failed)

    async def pause(self, failures: int) -> None:
        """Sleep after `failures` failed attempts in a row."""
        await self._sleep(self.budget.pause_s(failures, self._jitter()))

    async def attempt(self, call: Callable[[], Awaitable[T]], size: int = 0) -> T:
        """Call once, with the time limit of an attempt. Raises `BlobUnavailable` on a timeout."""
        limit_s = self.budget.limit_s(size)
        try:
            async with asyncio.timeout(limit_s):
                return await call()
        except TimeoutError as error:
            raise BlobUnavailable(f"no answer within {limit_s:g} s") from error


class RetryingStore:
    """A store with a `Retry` around each call.

    A put of an iterator gets one attempt without a time limit, because its pieces are gone afterwards. A put whose
    response was lost may return False for an object that it created itself. This is harmless: names are digests.
    """

    def __init__(
        self,
        inner: BlobStore,
        budget: RetryBudget = DEFAULT_BUDGET,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._inner = inner
        self._retry = Retry(budget, sleep=sleep, jitter=jitter)

    def __repr__(self) -> str:
        return f"<RetryingStore attempts={self._retry.budget.attempts} {self._inner!r}>"

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        if not isinstance(data, bytes):
            return await self._inner.put_if_absent(key, data)
        return await self._retry(lambda: self._inner.put_if_absent(key, data), len(data))

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        stat = (lambda: self._inner.stat(key)) if length is None else None
        return await self._retry(lambda: self._inner.read(key, offset, length), max(0, length or 0), stat)

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        await self._retry(lambda: self._inner.read_into(key, offset, into), into.nbytes)

    async def stat(self, key: str) -> BlobStat:
        return await self._retry(lambda: self._inner.stat(key))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        """Yield keys as `BlobStore.list` does. A listing that breaks or stalls starts again, after the last key."""
        last: str | None = None
        failed = 0
        while True:
            try:
                keys = self._inner.list(prefix)
                while (key := await self._next(keys)) is not None:
                    if last is None or key > last:
                        last, failed = key, 0  # progress renews the budget; otherwise a long listing could not finish
                        yield key
                return
            except BlobUnavailable:
                failed += 1
                if failed >= self._retry.budget.attempts:
                    raise
            await self._retry.pause(failed)

    async def _next(self, keys: AsyncIterator[str]) -> str | None:
        return await self._retry.attempt(lambda: anext(keys, None))

    async def delete(self, key: str) -> None:
        await self._retry(lambda: self._inner.delete(key))
