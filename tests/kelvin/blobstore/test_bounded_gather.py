"""Many calls at once, within their limit: results in order, the first failure ends the rest, nothing runs on."""

import asyncio

import pytest

from kelvin.blobstore.bounded_gather import bounded_gather


class Calls:
    """Counts what runs."""

    def __init__(self, failing: int | None = None) -> None:
        self.running = self.most = self.begun = 0
        self.failing = failing

    async def __call__(self, item: int) -> int:
        self.begun += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if item == self.failing:
                raise KeyError(item)
            return item * 2
        finally:
            self.running -= 1


@pytest.mark.parametrize("count", [0, 1, 4, 5, 100])
def test_bounded_gather_keeps_order(count: int) -> None:
    """In order, however many there are; never more at once than the limit."""
    calls = Calls()
    assert asyncio.run(bounded_gather(calls, range(count), 4)) == [2 * n for n in range(count)]
    assert calls.most == min(4, count)


async def test_first_failure_ends_the_others() -> None:
    """Is raised as it was; nothing new begins, nothing runs on."""
    calls, tasks = Calls(failing=5), asyncio.all_tasks()
    with pytest.raises(KeyError):
        await bounded_gather(calls, range(100), 4)
    assert calls.running == 0
    assert asyncio.all_tasks() == tasks
    assert calls.begun < 20


async def test_cancelled() -> None:
    """Who waits leaves nothing behind."""
    running = 0

    async def hang(item: int) -> None:
        nonlocal running
        running += 1
        try:
            await asyncio.Event().wait()
        finally:
            running -= 1

    task = asyncio.create_task(bounded_gather(hang, range(10), 4))
    while running < 4:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running == 0
