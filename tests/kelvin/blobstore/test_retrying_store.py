"""The retrying wrapper is a `BlobStore`. It retries only temporary failures, within its budget."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BlobNotFound, BlobStore, BlobUnavailable
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.blobstore.retrying_store import RetryBudget, RetryingStore
from tests.kelvin.blobstore.suite import BlobStoreSuite, keys_of, pieces


class FlakyStore(MemoryStore):
    """A store whose first `failures` calls fail. A listing also breaks after two keys while failures remain."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise BlobUnavailable("flaky")

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        self._fail()
        return await super().read(key, offset, length)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        passed = 0
        async for key in super().list(prefix):
            yield key
            passed += 1
            if self.calls < self.failures and passed == 2:
                self._fail()


class SilentStore(MemoryStore):
    """A store whose reads never return."""

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


class Pauses:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class TestRetryingStore(BlobStoreSuite):
    def open(self, path: Path) -> BlobStore:
        return RetryingStore(MemoryStore())


@pytest.mark.parametrize(
    ("failures", "calls", "succeeds"),
    [
        pytest.param(0, 1, True, id="a call that works is made once"),
        pytest.param(3, 4, True, id="three failures are survived by four attempts"),
        pytest.param(4, 4, False, id="the fourth failure of four is the caller's"),
    ],
)
def test_attempts(failures: int, calls: int, succeeds: bool) -> None:
    """Attempts are bounded, and pauses grow up to their cap."""
    inner, pauses = FlakyStore(failures), Pauses()
    store = RetryingStore(inner, RetryBudget(base_s=1.0, cap_s=3.0), sleep=pauses, jitter=lambda: 0.5)
    asyncio.run(inner.put_if_absent("t/a", b"x"))
    if succeeds:
        assert asyncio.run(store.read("t/a")) == b"x"
    else:
        with pytest.raises(BlobUnavailable):
            asyncio.run(store.read("t/a"))
    assert inner.calls == calls
    assert pauses.seconds == [0.5, 1.0, 1.5][: calls - 1]


def test_attempt_has_a_deadline() -> None:
    """A store that never replies is unavailable after the deadline of an attempt."""
    inner = SilentStore()
    asyncio.run(inner.put_if_absent("t/a", b"x"))
    store = RetryingStore(inner, RetryBudget(attempts=2, attempt_s=0.01), sleep=Pauses())
    with pytest.raises(BlobUnavailable):
        asyncio.run(store.read("t/a"))


def test_definite_failures_are_not_retried() -> None:
    """A failure that a retry can't change is raised at once."""
    inner, pauses = FlakyStore(0), Pauses()
    with pytest.raises(BlobNotFound):
        asyncio.run(RetryingStore(inner, sleep=pauses).read("t/missing"))
    assert inner.calls == 1
    assert pauses.seconds == []


async def test_broken_listing() -> None:
    """A listing that breaks several times yields each key once, in order, as long as each attempt makes progress."""
    inner = FlakyStore(failures=3)
    keys = [f"t/{n}" for n in range(8)]

    for key in keys:
        await inner.put_if_absent(key, b"x")
    assert await keys_of(RetryingStore(inner, RetryBudget(attempts=5), sleep=Pauses())) == keys
    assert inner.calls == 3


def test_iterators_are_not_repeated() -> None:
    """A put of an iterator is tried once, because its pieces can't be read again."""

    class Refusing(MemoryStore):
        calls = 0

        async def put_if_absent(self, key: str, data: object) -> bool:
            self.calls += 1
            raise BlobUnavailable("no")

    inner = Refusing()
    with pytest.raises(BlobUnavailable):
        asyncio.run(RetryingStore(inner, sleep=Pauses()).put_if_absent("t/a", pieces()))
    assert inner.calls == 1


@pytest.mark.virtual_time
async def test_a_listing_has_a_deadline() -> None:
    """A hanging listing is retried and yields each key once. If it hangs each time, it is unavailable."""

    class Hanging(MemoryStore):
        hangs = 2  # number of listings that hang

        async def list(self, prefix: str) -> AsyncIterator[str]:
            yield "t/a"
            if self.hangs:
                self.hangs -= 1
                await asyncio.Event().wait()
            yield "t/b"

    assert await keys_of(RetryingStore(Hanging(), sleep=Pauses())) == ["t/a", "t/b"]
    inner = Hanging()
    inner.hangs = 100
    async with asyncio.timeout(3600.0):
        with pytest.raises(BlobUnavailable):
            await keys_of(RetryingStore(inner, sleep=Pauses()))


@pytest.mark.virtual_time
async def test_object_of_unknown_size_gets_time_for_its_bytes() -> None:
    """An attempt to read a whole object gets as much time for a slow link as one with a known length."""

    class Slow(MemoryStore):
        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            found = await super().read(key, offset, length)
            await asyncio.sleep(len(found))
            return found

    inner = Slow()
    await inner.put_if_absent("t/a", bytes(60))
    store = RetryingStore(inner, RetryBudget(attempt_s=30.0, slowest_bytes_per_s=1.0), sleep=Pauses())
    assert await store.read("t/a", 0, 60) == bytes(60)
    assert await store.read("t/a") == bytes(60)
