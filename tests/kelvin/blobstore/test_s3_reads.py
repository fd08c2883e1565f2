"""A cancelled read waits for a thread that may still write to its memory, and abandons a thread that can't."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kelvin.blobstore import s3_reads
from kelvin.blobstore.s3_reads import CancelToken, RangeCalls, ReadCancelled


class Endpoint:
    """An endpoint that sends headers and body when the test allows. `written` records writes to the caller's memory."""

    def __init__(self, cancel_token: CancelToken) -> None:
        self.cancel_token = cancel_token
        self.head, self.body = threading.Event(), threading.Event()
        self.asked, self.reading = threading.Event(), threading.Event()
        self.written: list[str] = []

    def get(self) -> str:
        """Read as `get_range` does."""
        self.asked.set()
        assert self.head.wait(30)
        with self.cancel_token.read_body(self):
            self.reading.set()
            assert self.body.wait(30)
            self.written.append("body")
        return "etag"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


async def given_up(calls: RangeCalls, endpoint: Endpoint, moment: threading.Event) -> asyncio.Task[list[str]]:
    """Start a read and cancel it once `moment` is set."""
    task = asyncio.create_task(calls.run([endpoint.get], endpoint.cancel_token))
    await asyncio.to_thread(moment.wait, 30)
    task.cancel()
    await asyncio.wait({task}, timeout=0.05)
    return task


async def test_results_and_errors(threads: ThreadPoolExecutor) -> None:
    """Results are in order. The first error is raised and cancels the other calls."""

    calls = RangeCalls(threads)
    assert await calls.run([lambda: 1, lambda: 2], CancelToken()) == [1, 2]
    assert await calls.run([], CancelToken()) == []
    cancel_token = CancelToken()
    endpoint = Endpoint(cancel_token)

    def fail() -> str:
        assert endpoint.asked.wait(30)
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        await calls.run([endpoint.get, fail], cancel_token)
    endpoint.head.set()


async def test_cancel_before_the_head_ends_at_once(threads: ThreadPoolExecutor) -> None:
    """The read ends at once. The response that arrives later is not read."""

    endpoint = Endpoint(CancelToken())
    task = await given_up(RangeCalls(threads), endpoint, endpoint.asked)
    assert task.cancelled()
    endpoint.head.set()
    endpoint.body.set()
    threads.shutdown()
    assert endpoint.written == []
    with pytest.raises(ReadCancelled):
        endpoint.cancel_token.check()


async def test_cancel_while_the_body_is_read_waits(threads: ThreadPoolExecutor) -> None:
    """A read that is cancelled during its body ends when the body has been read."""

    endpoint = Endpoint(CancelToken())
    endpoint.head.set()
    task = await given_up(RangeCalls(threads), endpoint, endpoint.reading)
    assert not task.done()
    assert endpoint.written == []
    endpoint.body.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert endpoint.written == ["body"]


async def test_control_cancel_without_waiting(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if such a read didn't wait, its memory would be written to after it ended."""
    monkeypatch.setattr(CancelToken, "is_quiet", True)

    endpoint = Endpoint(CancelToken())
    endpoint.head.set()
    task = await given_up(RangeCalls(threads), endpoint, endpoint.reading)
    assert task.cancelled()
    endpoint.body.set()
    threads.shutdown()
    assert endpoint.written == ["body"], "after the end"


async def test_abandoned_reads_are_limited(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandoned reads are limited, because they occupy threads. Above the limit, a cancelled read waits."""
    monkeypatch.setattr(s3_reads, "MAX_ABANDONED", 1)

    calls = RangeCalls(threads)
    first, second, third = (Endpoint(CancelToken()) for _ in range(3))
    assert (await given_up(calls, first, first.asked)).cancelled()
    waiting = await given_up(calls, second, second.asked)
    assert not waiting.done()
    second.head.set()
    await asyncio.wait({waiting})
    first.head.set()
    while "abandoned=0" not in repr(calls):
        await asyncio.sleep(0.001)
    assert (await given_up(calls, third, third.asked)).cancelled()
    third.head.set()
