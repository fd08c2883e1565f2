"""Background tasks have an owner. Leaving the block ends all. A failing task is logged and affects no other."""

import asyncio

import pytest

from controlplane.tasks import Tasks


async def test_leaving_the_block_ends_all_tasks() -> None:
    """An exception that leaves the block cancels all tasks. A task started afterwards never runs."""
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def leave_with_error() -> None:
        async with tasks:
            for name in "abc":
                tasks.start(wait(name), name)
            await asyncio.sleep(0)
            raise ZeroDivisionError

    tasks = Tasks()
    with pytest.raises(ZeroDivisionError):
        await leave_with_error()
    assert sorted(ended) == ["a", "b", "c"]
    tasks.start(wait("late"), "late")
    await asyncio.sleep(0)
    assert (len(tasks), "late" in ended) == (0, False)


async def test_task_failure_is_logged_and_isolated(caplog: pytest.LogCaptureFixture) -> None:
    """The other tasks continue. The log names the failed task."""
    done = asyncio.Event()

    async def breaks() -> None:
        raise RuntimeError("defect")

    async def works() -> None:
        await asyncio.sleep(0)
        done.set()

    async with Tasks() as tasks:
        tasks.start(breaks(), "breaks")
        tasks.start(works(), "works")
        await done.wait()
        await tasks.wait_idle()
    (record,) = caplog.records
    assert record.__dict__["task"] == "breaks"


@pytest.mark.virtual_time
async def test_loop_goes_on_after_an_error_and_ends_with_the_block() -> None:
    """The loop restarts after an error. `wait_idle` does not wait for loops."""
    began, is_gone = 0, False

    async def body() -> None:
        nonlocal began, is_gone
        began += 1
        if began == 1:
            raise RuntimeError("database is locked")
        try:
            await asyncio.Event().wait()
        finally:
            is_gone = True

    async with Tasks() as tasks:
        tasks.start_loop("spending", body)
        await asyncio.sleep(1.0)
        await tasks.wait_idle()
        assert (began, is_gone) == (2, False)
    assert is_gone


async def test_wait_idle_waits_for_tasks_that_tasks_start() -> None:
    """`wait_idle` returns once no task runs at all."""
    order: list[int] = []

    async with Tasks() as tasks:

        async def chain(left: int) -> None:
            await asyncio.sleep(0)
            order.append(left)
            if left:
                tasks.start(chain(left - 1), f"chain {left - 1}")

        tasks.start(chain(3), "chain 3")
        await tasks.wait_idle()
    assert order == [3, 2, 1, 0]
