"""Two tenants share a version: a thousand requests of one delay the other by at most one service time. The product's
throttler, queue and slots run in virtual time.
"""

import asyncio
from collections.abc import Callable
from typing import ClassVar

import pytest

from activator.queue import slot_allocator as module
from activator.queue.policy.queue_bounds import QueueLimit
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.slot_shares import SlotShares
from activator.queue.policy.tenant_fair_queue import FairQueue
from tests.activator.control import replica_row
from tests.activator.queue.policy.test_tenant_fair_queue import Arrivals
from tests.activator.queue.slot_world import SlotWorld, queue_limits

FLOOD = 1000
SERVICE_S = 1.0
ASKS = 40  # requests of the quiet tenant
LATER_S = 1e9


async def _flooded(slots: int, loud_tokens: int, every_s: float) -> SlotWorld:
    """The loud tenant's thousand requests come at once. The quiet one sends less than its share at a fixed pace,
    whether or not it was answered.
    """
    names = ("a", "b")[: min(2, slots)]
    rows = (replica_row(name, slots // len(names)) for name in names)
    here = SlotWorld(*rows, limits=queue_limits(wait_s=LATER_S))
    loud, quiet = QueuedRequest("loud", 10, loud_tokens), QueuedRequest("quiet", 10, 100)
    flood = (here.serve(loud, SERVICE_S, LATER_S) for _ in range(FLOOD))
    times_s = (number * every_s for number in range(ASKS))
    await asyncio.gather(*flood, here.arrivals(quiet, times_s, SERVICE_S, LATER_S))
    here.throttler.check_integrity()
    return here


FAIR: list[tuple[int, int, float]] = [(1, 100, 2.3), (2, 100, 1.7), (4, 100, 1.0), (8, 100, 0.3), (8, 1000, 0.3)]


@pytest.mark.parametrize(("slots", "loud_tokens", "every_s"), FAIR, ids=str)
@pytest.mark.virtual_time
async def test_a_flood_costs_the_other_tenant_one_service_time(slots: int, loud_tokens: int, every_s: float) -> None:
    """This is the 95th percentile, with one slot or many, for requests as large as the flood's or smaller. The flood is
    served completely, and no slot idles while a request waits.
    """

    here = await _flooded(slots, loud_tokens, every_s)
    assert len(here.waits["quiet"]) == ASKS
    assert here.p95_s("quiet") <= SERVICE_S
    assert len(here.waits["loud"]) == FLOOD
    assert here.clock() <= (FLOOD + ASKS) / slots * SERVICE_S + 1


def _first_come(shared: object, bound: QueueLimit) -> object:
    return Arrivals(shared, bound)  # type: ignore[arg-type]


def _one_tenant(shared: object, bound: QueueLimit) -> object:
    """Return a queue that treats all tenants as one."""
    return _Blind(shared, bound)  # type: ignore[arg-type]


class _Blind(FairQueue[object]):
    """A queue that does not distinguish tenants."""

    asks: ClassVar[dict[object, QueuedRequest]] = {}

    def put(self, entry: object, ask: QueuedRequest, deadline_s: float) -> None:
        self.asks[entry] = ask
        super().put(entry, QueuedRequest("all", ask.nbytes, ask.tokens, ask.priority_class), deadline_s)

    def take(self, may_take: Callable[[str], bool] = lambda _: True) -> tuple[object, QueuedRequest] | None:
        found = super().take(may_take)
        return None if found is None else (found[0], self.asks.pop(found[0]))

    def settle(self, ask: QueuedRequest, tokens: int) -> None:
        super().settle(QueuedRequest("all", ask.nbytes, ask.tokens, ask.priority_class), tokens)

    def charge_immediate(self, ask: QueuedRequest) -> None:
        super().charge_immediate(QueuedRequest("all", ask.nbytes, ask.tokens, ask.priority_class))


class _NoShares(SlotShares):
    """Any tenant may take any free slot."""

    def may_take(self, tenant: str, weight: int, slots: int, free: int, running: int) -> bool:
        return free > 0


@pytest.mark.parametrize("queue", [_first_come, _one_tenant])
@pytest.mark.virtual_time
async def test_control_unfair_orders_are_detected(
    monkeypatch: pytest.MonkeyPatch, queue: Callable[..., object]
) -> None:
    """Negative control: order of arrival, and a queue that does not distinguish tenants, exceed the bound."""

    monkeypatch.setattr(module, "FairQueue", queue)
    monkeypatch.setattr(module, "SlotShares", _NoShares)
    here = await _flooded(8, 100, 0.3)
    assert here.p95_s("quiet") > SERVICE_S
    assert min(here.waits["quiet"]) > 100 * SERVICE_S
