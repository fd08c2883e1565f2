"""A guest of a shared version sends many times the owner's load, and the owner does not wait."""

import asyncio
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.slot_shares import WINDOW_S, SlotShares
from kelvin.contracts.deadline import Deadline
from tests.activator.control import replica_row
from tests.activator.queue.slot_world import KEY, SlotWorld, run_loop

SLOTS = 16
ANSWER_S = 3.0  # time that each request holds its slot
LATER_S = 1000.0
OWNER, GUEST = QueuedRequest("default", 10, 100), QueuedRequest("guest", 10, 100)


def load() -> SlotWorld:
    """Return a world with one replica."""
    return SlotWorld(replica_row("a", SLOTS))


async def clients(here: SlotWorld, tenant: str, count: int, until_s: float, weight: int = 1) -> None:
    """Run so many clients, each of which sends its next request at once."""

    async def client(number: int) -> None:
        await asyncio.sleep(number * 0.37)
        while here.clock() < until_s:
            await here.serve(QueuedRequest(tenant, 10, 100, weight=weight), ANSWER_S)
            here.throttler.check_integrity()

    await asyncio.gather(*(client(number) for number in range(count)))


def _now_and_then(every_s: float) -> Iterator[float]:
    return (5.0 + number * every_s for number in range(int(200.0 / every_s)))


@pytest.mark.parametrize("every_s", [1.5, 4.0, 40.0], ids=["often", "one at a time", "after long pauses"])
@pytest.mark.parametrize("kept", [True, False], ids=["shares", "control"])
@pytest.mark.virtual_time
async def test_guest_at_ten_times_the_load_keeps_no_owner_waiting(
    every_s: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner finds a free slot each time, and the guest uses all other slots. Control: without shares the owner
    waits for the end of a guest's answer.
    """
    if not kept:
        monkeypatch.setattr(SlotShares, "may_take", lambda self, tenant, weight, slots, free, running: free > 0)

    here = load()
    guest = asyncio.ensure_future(clients(here, "guest", 40, 205.0))
    await here.arrivals(OWNER, _now_and_then(every_s), ANSWER_S)
    await guest
    assert (here.p95_s("default") == 0.0) is kept, here.p95_s("default")
    if kept:
        owner_slots = min(SLOTS / 2, ANSWER_S / every_s + 1)
        assert len(here.waits["guest"]) >= (SLOTS - owner_slots) * 200.0 / ANSWER_S * 0.95
    here.throttler.check_integrity()


@pytest.mark.parametrize("weight", [1, 3])
@pytest.mark.virtual_time
async def test_tenants_that_want_all_slots_get_them_by_weight(weight: int) -> None:
    """Two guests and an idle owner: the guests share all slots by weight, and none is idle."""

    here = load()
    await asyncio.gather(clients(here, "g", 30, 300.0, weight), clients(here, "h", 30, 300.0))
    served = [len(here.waits[tenant]) for tenant in "gh"]
    assert weight * 0.8 <= served[0] / served[1] <= weight * 1.25, served
    assert sum(served) >= SLOTS * 300.0 / ANSWER_S * 0.97


@pytest.mark.virtual_time
async def test_owner_alone_has_all_slots() -> None:
    """This holds even after guests have used them."""

    here = load()
    await clients(here, "guest", 40, 30.0)
    await asyncio.sleep(30.0)
    await clients(here, "default", 40, here.clock() + 60.0)
    assert len(here.waits["default"]) >= SLOTS * 60.0 / ANSWER_S * 0.95


@pytest.mark.virtual_time
async def test_no_slot_idles_in_a_flood_of_guests() -> None:
    """Each slot is always busy, though some guests send now and then and the owner sends steadily."""

    here = load()
    flood, owner = clients(here, "flood", 40, 205.0), clients(here, "default", 2, 205.0)
    guests = (here.arrivals(QueuedRequest(f"g{n}", 10, 100), _now_and_then(4.0 + n), ANSWER_S) for n in range(8))
    await asyncio.gather(flood, owner, *guests)
    busy = sum(map(len, here.waits.values())) * ANSWER_S / SLOTS / here.clock()
    assert busy >= 0.97, busy
    assert here.p95_s("default") == 0.0


@pytest.mark.parametrize(("weight", "want"), [(1, 8), (3, 12)])
@pytest.mark.virtual_time
async def test_waiting_guest_leaves_the_owner_its_share_by_weight(weight: int, want: int) -> None:
    """The owner had all slots a moment ago. Then a guest waits with more requests than slots."""

    here = load()
    owner = [asyncio.ensure_future(here.serve(OWNER, ANSWER_S)) for _ in range(SLOTS)]
    await asyncio.sleep(1.0)
    waiting = [await here.start_request(QueuedRequest("guest", 10, 100, weight=weight)) for _ in range(2 * SLOTS)]
    await asyncio.gather(*owner)
    await run_loop()
    assert sum(task.done() for task in waiting) == want
    here.throttler.check_integrity()
    for task in waiting:
        task.cancel()


@pytest.mark.virtual_time
async def test_slot_is_not_kept_for_an_owner_that_has_stopped_asking() -> None:
    """A guest gets the slot within the two windows in which the owner's need is remembered, though no other request
    starts or ends meanwhile.
    """

    here = SlotWorld(replica_row("a", 2))
    await asyncio.sleep(2 * WINDOW_S)
    deadline = Deadline(here.clock() + LATER_S)
    async with here.throttler.slot(KEY, OWNER, deadline):
        pass
    async with here.throttler.slot(KEY, GUEST, deadline):  # an answer of many minutes
        began_s = here.clock()
        async with here.throttler.slot(KEY, GUEST, deadline):
            assert 0 < here.clock() - began_s <= 2 * WINDOW_S
            here.throttler.check_integrity()


@pytest.mark.parametrize("weight", [1, 2])
@pytest.mark.virtual_time
async def test_need_of_an_owner_counts_after_a_quiet_time(weight: int) -> None:
    """The owner's request comes long after the last event, while guests use all slots. It gets the next slot."""

    here = SlotWorld(replica_row("a", 2))
    held = [await here.acquire(GUEST, LATER_S) for _ in range(2)]
    waiting = await here.start_request(GUEST, LATER_S)
    await asyncio.sleep(3 * WINDOW_S)
    owner = await here.start_request(QueuedRequest("default", 10, 100, weight=weight), LATER_S)
    here.release(held[0], GUEST, 100)
    here.throttler.check_integrity()
    await run_loop()
    assert owner.done()
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("ask", [OWNER, GUEST], ids=["default", "guest"])
@pytest.mark.virtual_time
async def test_hedge_takes_a_slot_of_a_replaced_version(ask: QueuedRequest) -> None:
    """All replicas were replaced, and the new version queue does not know the tenant yet. No slot is left behind. The
    tenant is the owner or a guest.
    """

    here = SlotWorld(replica_row("a", 2), replica_row("b", 2))
    deadline = Deadline(here.clock() + 50.0)
    async with here.throttler.slot(KEY, ask, deadline) as slot:
        first = slot.replica
        here.feed(removed_replicas=("a", "b"))
        here.feed(replica_row("c", 2))
        second = here.throttler.try_take_slot_elsewhere(KEY, ask, deadline, first)
        assert second is not None
        here.throttler.check_integrity()
        second.release()
    here.throttler.check_integrity()
    for _ in range(2):
        await here.acquire(ask)
    here.throttler.check_integrity()


@pytest.mark.parametrize("tenants", [20, 200])
@pytest.mark.virtual_time
async def test_slot_that_comes_free_costs_little_for_each_tenant(tenants: int) -> None:
    """All tenants share one version and wait. Counted are the Python frames of one release, per waiting tenant."""

    here = SlotWorld(replica_row("a", 256))
    asks = [QueuedRequest(f"t{number}", 10, 100) for number in range(tenants)]
    waiting = [asyncio.ensure_future(here.acquire(asks[n % tenants])) for n in range(500)]
    await asyncio.sleep(0.01)
    replica = waiting[0].result()
    entered = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        here.release(replica, asks[0], 100)
    finally:
        sys.setprofile(None)
    here.throttler.check_integrity()
    for task in waiting:
        task.cancel()
    assert entered <= 20 * tenants


async def test_owner_that_waits_again_counts() -> None:
    """Its replica refused the request and was removed. A guest waited for the next replica first."""
    here = SlotWorld(replica_row("a", SLOTS))
    replica = await here.acquire(OWNER)
    here.feed(removed_replicas=("a",))
    waiting = await here.start_request(GUEST)
    again = asyncio.create_task(
        here.throttler.reacquire(KEY, replica, OWNER, Deadline.after(50.0, here.clock()), here.clock(), None)
    )
    await run_loop()
    here.feed(replica_row("b", SLOTS))
    await asyncio.wait((waiting, again))
    here.throttler.check_integrity()
