"""`bounded_gather` limits concurrency, keeps results in order, and cancels the other calls at the first failure."""

import asyncio

import pytest

from kelvin.blobstore.bounded_gather import bounded_gather


class Calls:
    """A callable that counts its running and started calls, and fails for one item."""

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
    """Results are in the order of the items. The limit is reached but never exceeded."""
    calls = Calls()
    assert asyncio.run(bounded_gather(calls, range(count), 4)) == [2 * n for n in range(count)]
    assert calls.most == min(4, count)


async def test_first_failure_ends_the_others() -> None:
    """The first exception is raised unchanged. The running calls end and few others are started."""
    calls, tasks = Calls(failing=5), asyncio.all_tasks()
    with pytest.raises(KeyError):
        await bounded_gather(calls, range(100), 4)
    assert calls.running == 0
    assert asyncio.all_tasks() == tasks
    assert calls.begun < 20


async def test_cancelled() -> None:
    """A cancelled gather ends its running calls."""
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
