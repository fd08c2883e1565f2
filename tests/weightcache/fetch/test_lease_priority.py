"""Background work starts while no lease waits, and gives way to leases of other versions, not of its own."""

import asyncio

import pytest

from weightcache.fetch.version_loader import LeasePriority

ONE, OTHER = ("acme", "1"), ("acme", "2")


async def test_prefetch_waits_for_leases_of_other_versions() -> None:
    """Work does not start while a lease of another version waits. A lease of its own version does not matter."""

    waiting = LeasePriority()
    with waiting.waiting_lease(ONE):
        await waiting.wait_until_free(ONE)
        with waiting.waiting_lease(OTHER), waiting.waiting_lease(OTHER):
            held = asyncio.ensure_future(waiting.wait_until_free(ONE))
            await asyncio.sleep(0)
            assert waiting.is_busy(ONE)
            assert not held.done()
        await asyncio.wait_for(held, 5)
        assert waiting.is_busy()
    assert not waiting.is_busy()


async def test_prefetch_is_cancelled_by_another_versions_lease() -> None:
    """Another version's lease cancels the work and waits for its end. A lease of its own version does not."""

    waiting, begun, ended = LeasePriority(), asyncio.Event(), asyncio.Event()
    finish = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await finish.wait()
        finally:
            ended.set()

    running = asyncio.ensure_future(waiting.try_run(work, ONE))
    await begun.wait()
    with waiting.waiting_lease(ONE):
        await asyncio.sleep(0)
        assert not ended.is_set()
    with waiting.waiting_lease(OTHER):
        assert await running is False
        assert ended.is_set()
    finish.set()
    assert await waiting.try_run(work, ONE) is True


async def test_try_run_raises_what_the_work_raises() -> None:
    """Errors of the work are raised, and cancelling `try_run` leaves no task behind."""
    waiting, before = LeasePriority(), asyncio.all_tasks()

    async def fails() -> None:
        raise ZeroDivisionError

    async def lasts() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await waiting.try_run(fails, ONE)
    running = asyncio.ensure_future(waiting.try_run(lasts, ONE))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == before
