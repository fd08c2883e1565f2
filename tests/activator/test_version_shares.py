"""A guest of a shared version, at many times the load of its owner, does not keep the owner waiting."""

import asyncio
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from activator.keys import VersionKey
from activator.policy.admission import QueueLimits
from activator.policy.ask import Ask
from activator.policy.bounds import Bound
from activator.policy.slot_shares import WINDOW_S, SlotShares
from activator.throttler import Throttler
from contracts.control import Feed
from contracts.deadline import Deadline
from tests.activator.control import VERSION, replica_row
from tests.activator.test_throttler import LIMITS, Bell
from tests.virtual_loop import run_virtually

KEY = VersionKey("default", "m", VERSION)
SLOTS = 16
ANSWER_S = 3.0  # that a slot is held for


class Load:
    """Requests of one version on virtual time."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.throttler = Throttler(LIMITS, Bell(), clock=self.loop.time, draw=lambda n: 0)
        self.throttler.apply(Feed(revision=1, replicas=(replica_row("a", SLOTS),)))
        self.served: dict[str, list[float]] = {}

    async def ask(self, tenant: str, weight: int = 1) -> None:
        """One request, from its arrival to the end of its answer."""
        began_s = self.loop.time()
        ask = Ask(tenant, 10, 100, weight=weight)
        async with self.throttler.slot(KEY, ask, Deadline(began_s + 50.0)):
            self.served.setdefault(tenant, []).append(self.loop.time() - began_s)
            self.throttler.check_integrity()
            await asyncio.sleep(ANSWER_S)

    async def clients(self, tenant: str, count: int, until_s: float, weight: int = 1) -> None:
        """So many, each of which asks again at once."""

        async def client(number: int) -> None:
            await asyncio.sleep(number * 0.37)
            while self.loop.time() < until_s:
                await self.ask(tenant, weight)

        await asyncio.gather(*(client(number) for number in range(count)))

    async def arrivals(self, tenant: str, at_s: Iterator[float]) -> None:
        """Requests at these times, whatever became of those before."""
        asked = []
        for time_s in at_s:
            await asyncio.sleep(time_s - self.loop.time())
            asked.append(asyncio.ensure_future(self.ask(tenant)))
        await asyncio.gather(*asked)

    def p95_s(self, tenant: str) -> float:
        waits = sorted(self.served[tenant])
        return waits[int(len(waits) * 0.95)]


def _now_and_then(every_s: float, until_s: float = 200.0) -> Iterator[float]:
    count = int(until_s / every_s)
    return (5.0 + number * every_s for number in range(count))


@pytest.mark.parametrize("every_s", [1.5, 4.0, 40.0], ids=["often", "one at a time", "after long pauses"])
@pytest.mark.parametrize("kept", [True, False], ids=["shares", "control"])
@pytest.mark.virtual_time
async def test_guest_at_ten_times_the_load_keeps_no_owner_waiting(
    every_s: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner finds a slot each time, so that its time to first token is that of its replica. The guest has all other
    slots. The control gives slots to whoever is next: the owner waits for the end of one of the guest's answers.
    """
    if not kept:
        monkeypatch.setattr(SlotShares, "may_take", lambda self, tenant, weight, slots, free, running: free > 0)

    load = Load()
    guest = asyncio.ensure_future(load.clients("guest", 40, 205.0))
    await load.arrivals("default", _now_and_then(every_s))
    await guest
    assert (load.p95_s("default") == 0.0) is kept, load.p95_s("default")
    if kept:
        owner_slots = min(SLOTS / 2, ANSWER_S / every_s + 1)
        assert len(load.served["guest"]) >= (SLOTS - owner_slots) * 200.0 / ANSWER_S * 0.95
    load.throttler.check_integrity()


@pytest.mark.parametrize("weight", [1, 3])
@pytest.mark.virtual_time
async def test_tenants_that_want_all_slots_get_them_by_weight(weight: int) -> None:
    """Two guests of one weight or another, and an owner that does nothing: they share all slots, and none is idle."""

    load = Load()
    await asyncio.gather(load.clients("g", 30, 300.0, weight), load.clients("h", 30, 300.0))
    ratio = len(load.served["g"]) / len(load.served["h"])
    assert weight * 0.8 <= ratio <= weight * 1.25, ratio
    assert len(load.served["g"]) + len(load.served["h"]) >= SLOTS * 300.0 / ANSWER_S * 0.97


@pytest.mark.virtual_time
async def test_owner_alone_has_all_slots() -> None:
    """Also once its guests have gone."""

    load = Load()
    await load.clients("guest", 40, 30.0)
    await asyncio.sleep(30.0)
    began_s, before = load.loop.time(), len(load.served.get("default", ()))
    await load.clients("default", 40, began_s + 60.0)
    assert len(load.served["default"]) - before >= SLOTS * 60.0 / ANSWER_S * 0.95


@pytest.mark.virtual_time
async def test_no_slot_idles_in_a_flood_of_guests() -> None:
    """Each slot is busy all the time, though some guests ask now and then and the owner asks steadily."""

    load = Load()
    flood = asyncio.ensure_future(load.clients("flood", 40, 205.0))
    owner = asyncio.ensure_future(load.clients("default", 2, 205.0))
    guests = (load.arrivals(f"g{number}", _now_and_then(4.0 + number)) for number in range(8))
    await asyncio.gather(flood, owner, *guests)
    busy = sum(map(len, load.served.values())) * ANSWER_S / SLOTS / load.loop.time()
    assert busy >= 0.97, busy
    assert load.p95_s("default") == 0.0


@pytest.mark.parametrize(("weight", "want"), [(1, 8), (3, 12)])
@pytest.mark.virtual_time
async def test_waiting_guest_leaves_the_owner_its_share_by_weight(weight: int, want: int) -> None:
    """The owner had all slots a moment ago, and a guest then waits with more requests than there are slots."""

    loop = asyncio.get_running_loop()
    load = Load()
    owner = [asyncio.ensure_future(load.ask("default")) for _ in range(SLOTS)]
    await asyncio.sleep(1.0)
    asks = [Ask("guest", 10, 100, weight=weight) for _ in range(2 * SLOTS)]
    waiting = [asyncio.ensure_future(load.throttler.acquire(KEY, ask, Deadline(loop.time() + 50.0))) for ask in asks]
    await asyncio.gather(*owner)
    assert sum(task.done() for task in waiting) == want
    load.throttler.check_integrity()
    for task in waiting:
        task.cancel()


@pytest.mark.virtual_time
async def test_slot_is_not_kept_for_an_owner_that_has_stopped_asking() -> None:
    """A guest gets it within the two windows in which the owner is remembered. No other request comes or ends
    meanwhile, as where answers are long.
    """

    loop = asyncio.get_running_loop()
    throttler = Throttler(LIMITS, Bell(), clock=loop.time, draw=lambda n: 0)
    throttler.apply(Feed(revision=1, replicas=(replica_row("a", 2),)))
    await asyncio.sleep(2 * WINDOW_S)
    deadline = Deadline(loop.time() + 1000.0)
    async with throttler.slot(KEY, Ask("default", 10, 100), deadline):
        pass
    async with throttler.slot(KEY, Ask("guest", 10, 100), deadline):  # an answer of many minutes
        began_s = loop.time()
        async with throttler.slot(KEY, Ask("guest", 10, 100), deadline):
            assert 0 < loop.time() - began_s <= 2 * WINDOW_S
            throttler.check_integrity()


@pytest.mark.parametrize("weight", [1, 2])
@pytest.mark.virtual_time
async def test_need_of_an_owner_counts_after_a_quiet_time(weight: int) -> None:
    """Its request comes long after the last event, while guests have all slots and wait. It gets the next slot."""

    loop = asyncio.get_running_loop()
    throttler = Throttler(LIMITS, Bell(), clock=loop.time, draw=lambda n: 0)
    throttler.apply(Feed(revision=1, replicas=(replica_row("a", 2),)))
    deadline, guest = Deadline(loop.time() + 1000.0), Ask("guest", 10, 100)
    held = [await throttler.acquire(KEY, guest, deadline) for _ in range(2)]
    waiting = asyncio.ensure_future(throttler.acquire(KEY, guest, deadline))
    await asyncio.sleep(3 * WINDOW_S)
    ask = Ask("default", 10, 100, weight=weight)
    owner = asyncio.ensure_future(throttler.acquire(KEY, ask, deadline))
    await asyncio.sleep(0)
    throttler.slots.release(KEY, held[0], guest, 100)
    throttler.check_integrity()
    await asyncio.sleep(0)
    assert owner.done()
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("tenant", ["default", "guest"])
@pytest.mark.virtual_time
async def test_hedge_takes_a_slot_of_a_version_that_was_replaced_meanwhile(tenant: str) -> None:
    """All replicas went, and others came: the new line has not heard of the tenant. No slot is left behind. The tenant
    is the owner or a guest.
    """

    loop = asyncio.get_running_loop()
    throttler = Throttler(LIMITS, Bell(), clock=loop.time, draw=lambda n: 0)
    throttler.apply(Feed(revision=1, replicas=(replica_row("a", 2), replica_row("b", 2))))
    deadline, ask = Deadline(loop.time() + 50.0), Ask(tenant, 10, 100)
    async with throttler.slot(KEY, ask, deadline) as slot:
        first = slot.replica
        throttler.apply(Feed(revision=2, removed_replicas=("a", "b")))
        throttler.apply(Feed(revision=3, replicas=(replica_row("c", 2),)))
        second = throttler.try_other(KEY, ask, deadline, first)
        assert second is not None
        throttler.check_integrity()
        second.release()
    throttler.check_integrity()
    for _ in range(2):
        await throttler.acquire(KEY, ask, deadline)
    throttler.check_integrity()


@pytest.mark.parametrize("tenants", [20, 200])
def test_slot_that_comes_free_costs_little_for_each_tenant(tenants: int) -> None:
    """All share one version and wait. Frames of Python that one release enters, for each tenant that waits."""

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        wide = Bound(1000, 1_000_000, 1_000_000)
        throttler = Throttler(QueueLimits(wide, wide, wide, 60.0), Bell(), clock=loop.time, draw=lambda n: 0)
        throttler.apply(Feed(revision=1, replicas=(replica_row("a", 256),)))
        deadline, asks = Deadline(loop.time() + 50.0), [Ask(f"t{number}", 10, 100) for number in range(tenants)]
        waiting = [asyncio.ensure_future(throttler.acquire(KEY, asks[n % tenants], deadline)) for n in range(500)]
        await asyncio.sleep(0.01)
        replica = waiting[0].result()
        entered = 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            nonlocal entered
            entered += event == "call"

        sys.setprofile(count)
        try:
            throttler.slots.release(KEY, replica, asks[0], 100)
        finally:
            sys.setprofile(None)
        throttler.check_integrity()
        for task in waiting:
            task.cancel()
        return entered

    assert run_virtually(scenario()) <= 20 * tenants
