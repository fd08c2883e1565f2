"""Calls in threads end before their caller goes on, whatever happens to him."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from blobstore.threads import all_to_the_end, to_the_end


def test_results_are_in_order() -> None:
    """As many as calls; none of none."""

    async def scenario() -> None:
        assert await all_to_the_end(None, [partial(pow, n, 2) for n in range(5)], lambda: None) == [0, 1, 4, 9, 16]
        assert await all_to_the_end(None, [], lambda: None) == []

    asyncio.run(scenario())


def test_the_first_error_halts_the_others() -> None:
    """They end, and the error is the one that began it."""
    halted, ended = threading.Event(), threading.Event()

    def waiting() -> None:
        assert halted.wait(30)
        ended.set()
        raise ValueError("halted")

    def failing() -> None:
        raise KeyError("first")

    async def scenario() -> None:
        with pytest.raises(KeyError, match="first"):
            await all_to_the_end(None, [waiting, failing], halted.set)

    asyncio.run(scenario())
    assert ended.is_set()


def test_cancelled_again_and_again() -> None:
    """It is waited for all the same, also for what had not begun."""
    halted, begun = threading.Event(), threading.Event()
    ran: list[int] = []

    def call() -> None:
        begun.set()
        assert halted.wait(30)
        ran.append(1)

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as threads:
            work = asyncio.ensure_future(all_to_the_end(threads, [call, call, call], lambda: None))
            await asyncio.to_thread(begun.wait, 30)
            for _ in range(3):
                work.cancel()
                await asyncio.sleep(0)
            assert not work.done()
            halted.set()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert len(ran) == 3

    asyncio.run(scenario())


def test_one_call() -> None:
    """Its result or its error."""

    async def scenario() -> None:
        assert await to_the_end(None, pow, 2, 10) == 1024
        with pytest.raises(ZeroDivisionError):
            await to_the_end(None, divmod, 1, 0)

    asyncio.run(scenario())


def test_one_call_is_waited_for_however_often_its_caller_is_cancelled() -> None:
    """Its result, or its error, is nobody's then."""
    halted, begun = threading.Event(), threading.Event()
    ran: list[int] = []

    def call() -> None:
        begun.set()
        assert halted.wait(30)
        ran.append(1)
        raise KeyError("late")

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as threads:
            work = asyncio.ensure_future(to_the_end(threads, call))
            await asyncio.to_thread(begun.wait, 30)
            for _ in range(3):
                work.cancel()
                await asyncio.sleep(0)
            assert not work.done()
            halted.set()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert ran == [1]

    asyncio.run(scenario())
