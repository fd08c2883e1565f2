"""A fair lock is shared by tenant, weight and time held. Its queue is bounded, and waiting can be cancelled."""

import asyncio

import pytest

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.process.fair_lock import FairLock


class RecordingLock:
    """A lock that records the order of its holders."""

    def __init__(self) -> None:
        self.lock = FairLock("the queue", 8, 4)
        self.began: list[str] = []

    async def work(self, tenant: str, lasts_s: float, weight: int = 1) -> None:
        async with self.lock.hold(tenant, weight):
            self.began.append(tenant)
            await asyncio.sleep(lasts_s)


@pytest.mark.virtual_time
async def test_tenant_with_one_request_waits_for_one_holder_of_another() -> None:
    """A newcomer waits for at most one request of a tenant with many long ones."""
    recorder = RecordingLock()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(recorder.work("many", 60))
        await asyncio.sleep(1)
        tasks.create_task(recorder.work("one", 5))
    assert recorder.began == ["many", "one", "many", "many", "many", "many"]
    recorder.lock.check_integrity()


async def test_cancelled_request_does_not_wait_for_a_free_lock() -> None:
    """A cancelled waiter leaves the queue when its task runs next, which may be after the holder's release."""
    recorder = RecordingLock()
    async with recorder.lock.hold("a"):
        waiting = asyncio.create_task(recorder.work("b", 0))
        await asyncio.sleep(0)
        waiting.cancel()
    recorder.lock.check_integrity()
    await asyncio.gather(waiting, return_exceptions=True)
    assert recorder.lock.waiting == 0
    recorder.lock.check_integrity()


@pytest.mark.virtual_time
async def test_lock_is_shared_by_weight_and_time() -> None:
    """With three times the weight, a tenant gets three times as much time, while both always wait."""
    recorder, used = RecordingLock(), {"light": 0.0, "heavy": 0.0}

    async def always(tenant: str, lasts_s: float, weight: int) -> None:
        while sum(used.values()) < 4000:
            async with recorder.lock.hold(tenant, weight):
                await asyncio.sleep(lasts_s)
                used[tenant] += lasts_s

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(always("light", 10, 1))
            tasks.create_task(always("heavy", 5, 3))
    assert used["heavy"] / used["light"] == pytest.approx(3, rel=0.1)


@pytest.mark.virtual_time
async def test_tenant_that_was_away_has_no_claim_from_before() -> None:
    """A tenant gets no credit for time in which it didn't wait."""
    recorder = RecordingLock()
    for _ in range(10):
        await recorder.work("busy", 100)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(recorder.work("busy", 10))
        await asyncio.sleep(1)
        for tenant in ("new", "busy", "new", "busy"):
            tasks.create_task(recorder.work(tenant, 10))
    assert recorder.began[10:] == ["busy", "new", "busy", "new", "busy"]


@pytest.mark.virtual_time
async def test_one_tenant_can_not_fill_the_queue() -> None:
    """A tenant's own share is full first, while others are accepted. A full queue refuses every tenant."""
    recorder = RecordingLock()
    waiting = [asyncio.create_task(recorder.work("many", 60)) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as refused:
        await recorder.work("many", 1)
    assert isinstance(refused.value.failure, Overloaded)
    waiting += [asyncio.create_task(recorder.work(f"t{at}", 1)) for at in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as refused:
        await recorder.work("one more", 1)
    assert refused.value.failure == Overloaded("the queue", 8, 1.0)
    await asyncio.gather(*waiting)


@pytest.mark.virtual_time
@pytest.mark.parametrize("moment", [0, 1, 2, 3, 4])
async def test_cancelled_waiter_leaves_the_lock_to_others(moment: int) -> None:
    """Whenever a waiter is cancelled, even as the lock is granted to it, the next waiter gets the lock."""
    recorder = RecordingLock()
    first = asyncio.create_task(recorder.work("a", 1))
    leaver = asyncio.create_task(recorder.work("b", 1))
    last = asyncio.create_task(recorder.work("c", 1))
    await asyncio.sleep(0)
    first.cancel()
    for _ in range(moment):
        await asyncio.sleep(0)
    leaver.cancel()
    await asyncio.wait_for(last, 10)
    assert recorder.began[-1] == "c"
    recorder.lock.check_integrity()
