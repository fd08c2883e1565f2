"""Blocking calls in a thread beside the event loop, and the bridge that brings engine events to the loop."""

import asyncio
import threading

import pytest

from kelvin.contracts.serving.stream_frames import Counts
from runtime.drivers import thread_bridge as module
from runtime.drivers.interface import Event, Generated
from runtime.drivers.thread_bridge import ThreadBridge, run_in_thread


def test_run_in_thread_returns_from_a_named_daemon_thread() -> None:
    seen: list[tuple[str, bool]] = []

    def work() -> int:
        seen.append((threading.current_thread().name, threading.current_thread().daemon))
        return 7

    assert asyncio.run(run_in_thread("restore", work)) == 7
    assert seen == [("restore", True)]


def test_run_in_thread_raises_what_the_call_raises() -> None:
    def work() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError, match="k"):
        asyncio.run(run_in_thread("t", work))


async def test_a_caller_that_gives_up_does_not_wait() -> None:
    """A cancelled call does not delay its caller or the end of the loop. Its late result is dropped."""
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


def _batch(number: int) -> list[Event]:
    return [Generated("r", number, Counts())]


async def test_batches_arrive_in_order() -> None:
    seen: list[int] = []
    done = asyncio.Event()

    def take(events: list[Event]) -> None:
        seen.extend(event.token_id for event in events if isinstance(event, Generated))
        if len(seen) == 500:
            done.set()

    handover = ThreadBridge(asyncio.get_running_loop(), take, max_batches=4)

    def post() -> None:
        for number in range(500):
            handover.post(_batch(number))

    poster = threading.Thread(target=post)
    poster.start()
    async with asyncio.timeout(20):
        await done.wait()
    poster.join(20)
    assert seen == list(range(500))


async def test_the_engine_waits_for_a_loop_that_is_behind() -> None:
    """The engine's thread waits while the loop has `max_batches` unread batches."""
    posted: list[int] = []
    full = threading.Event()

    handover = ThreadBridge(asyncio.get_running_loop(), lambda _: None, max_batches=3)

    def post() -> None:
        for number in range(5):
            if number == 3:
                full.set()
            handover.post(_batch(number))
            posted.append(number)

    poster = threading.Thread(target=post)
    poster.start()
    assert full.wait(20)  # the loop is blocked meanwhile
    assert posted == [0, 1, 2]
    await asyncio.to_thread(poster.join, 20)
    assert posted == [0, 1, 2, 3, 4]


def test_post_returns_once_the_loop_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POST_RETRY_S", 0.01)
    loop = asyncio.new_event_loop()
    handover = ThreadBridge(loop, lambda _: None, max_batches=1)
    loop.close()
    handover.post(_batch(0))
    handover.post(_batch(1))  # the bridge is full, and known to be closed


async def test_closed_thread_bridge_posts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed bridge never blocks, because the engine's thread has to end."""
    monkeypatch.setattr(module, "_POST_RETRY_S", 3600.0)
    handover = ThreadBridge(asyncio.get_running_loop(), lambda _: None, max_batches=1)
    handover.post(_batch(0))
    handover.close()
    poster = threading.Thread(target=handover.post, args=(_batch(1),), daemon=True)
    poster.start()
    poster.join(20)  # the loop is blocked meanwhile
    assert not poster.is_alive()
