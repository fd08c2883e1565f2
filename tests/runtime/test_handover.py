"""Events cross threads in order; a loop that is behind slows the engine, one that is gone does not hold it."""

import asyncio
import threading

import pytest

from contracts.frames import Counts
from runtime import threads as module
from runtime.engine.interface import Event, Generated
from runtime.threads import Handover


def _batch(number: int) -> list[Event]:
    return [Generated("r", number, Counts())]


async def test_batches_arrive_in_order() -> None:
    """As they were posted, from the other thread."""
    seen: list[int] = []
    done = asyncio.Event()

    def take(events: list[Event]) -> None:
        seen.extend(event.token_id for event in events if isinstance(event, Generated))
        if len(seen) == 500:
            done.set()

    handover = Handover(asyncio.get_running_loop(), take, max_batches=4)

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
    """No more batches are under way than there are places."""
    posted: list[int] = []
    full = threading.Event()

    handover = Handover(asyncio.get_running_loop(), lambda _: None, max_batches=3)

    def post() -> None:
        for number in range(5):
            if number == 3:
                full.set()
            handover.post(_batch(number))
            posted.append(number)

    poster = threading.Thread(target=post)
    poster.start()
    assert full.wait(20)  # the loop stands still meanwhile
    assert posted == [0, 1, 2]
    await asyncio.to_thread(poster.join, 20)
    assert posted == [0, 1, 2, 3, 4]


def test_nobody_waits_for_a_loop_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, or its loop closed: posting returns."""
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    loop = asyncio.new_event_loop()
    handover = Handover(loop, lambda _: None, max_batches=1)
    loop.close()
    handover.post(_batch(0))
    handover.post(_batch(1))  # there is no place, and it is known to be closed
