"""A call in a thread ends before its caller continues, even if the caller is cancelled."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kelvin.process.thread_calls import run_uncancellable


async def test_thread_call_returns_result_or_error() -> None:
    assert await run_uncancellable(None, pow, 2, 10) == 1024
    with pytest.raises(ZeroDivisionError):
        await run_uncancellable(None, divmod, 1, 0)


async def test_repeated_cancellation_still_waits_for_the_call() -> None:
    """The result or error of the call is dropped."""
    halted, begun = threading.Event(), threading.Event()
    ran: list[int] = []

    def call() -> None:
        begun.set()
        assert halted.wait(30)
        ran.append(1)
        raise KeyError("late")

    with ThreadPoolExecutor(1) as threads:
        work = asyncio.ensure_future(run_uncancellable(threads, call))
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(3):
            work.cancel()
            await asyncio.sleep(0)
        assert not work.done()
        halted.set()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert ran == [1]
