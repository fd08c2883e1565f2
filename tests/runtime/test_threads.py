"""A blocking call beside the loop: its result, its exception, and nothing that anybody must wait for."""

import asyncio
import threading

import pytest

from runtime.threads import run_in_thread


def test_its_result_and_its_thread() -> None:
    """It runs under the name it was given, in a thread that no exit waits for."""
    seen: list[tuple[str, bool]] = []

    def work() -> int:
        seen.append((threading.current_thread().name, threading.current_thread().daemon))
        return 7

    assert asyncio.run(run_in_thread("restore", work)) == 7
    assert seen == [("restore", True)]


def test_its_exception_is_the_callers() -> None:
    """As it was raised."""

    def work() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError, match="k"):
        asyncio.run(run_in_thread("t", work))


async def test_a_caller_that_gives_up_does_not_wait() -> None:
    """Neither does the end of the loop; what comes late is dropped."""
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(20)
        ended.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_in_thread("t", work)
    assert not ended.is_set()
    release.set()
    assert ended.wait(20)
