"""Two tenants stand in one version's line: a thousand requests of one at once cost the other at most one service time.

The product's own throttler, queue and slots, in virtual time: nothing here reads a clock.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

import pytest

from activator import slots as module
from activator.policy.admission import QueueLimits
from activator.policy.ask import Ask
from activator.policy.bounds import Bound
from activator.policy.fair import FairQueue
from activator.policy.slot_shares import SlotShares
from activator.throttler import Throttler
from contracts.deadline import Deadline
from tests.activator.control import replica_row
from tests.activator.policy.test_fair import Arrivals
from tests.activator.test_throttler import KEY, Bell, _feed, _turns

FLOOD = 1000
SERVICE_S = 1.0
ASKS = 40  # of the quiet tenant, one after the other
WIDE = Bound(10_000, 1 << 30, 1 << 30)


@dataclass
class Upstream:
    """Replicas of fixed service time, and the time that goes on only when nobody can do anything any more."""

    throttler: Throttler
    now_s: float = 0.0
    order: Iterator[int] = field(default_factory=count)
    ends: list[tuple[float, int, asyncio.Event]] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=lambda: {"loud": [], "quiet": []})

    async def ask(self, tenant: str, tokens: int) -> None:
        """One request, from its arrival to its end."""
        came_s = self.now_s
        async with self.throttler.slot(KEY, Ask(tenant, 10, tokens), Deadline(1e9)):
            self.waits[tenant].append(self.now_s - came_s)
            await self.until(self.now_s + SERVICE_S)

    async def until(self, at_s: float) -> None:
        """Sleep."""
        due = asyncio.Event()
        heapq.heappush(self.ends, (at_s, next(self.order), due))
        await due.wait()

    async def run(self, *tasks: "asyncio.Task[None]") -> None:
        """Until all have ended."""
        while not all(task.done() for task in tasks):
            await _turns(6)
            if self.ends:
                self.now_s = self.ends[0][0]
            while self.ends and self.ends[0][0] <= self.now_s:
                heapq.heappop(self.ends)[2].set()
                await _turns(6)


def _p95(waits: list[float]) -> float:
    return sorted(waits)[int(0.95 * (len(waits) - 1) + 0.999)]


async def _flooded(slots: int, loud_tokens: int, every_s: float) -> Upstream:
    """The loud tenant's thousand come at once; from then on the quiet one asks for less than its share, at a pace of
    its own: whether it was answered or not.
    """
    limits = QueueLimits(WIDE, WIDE, WIDE, 1e9)
    throttler = Throttler(limits, Bell(), clock=lambda: here.now_s, draw=lambda n: 0)
    here = Upstream(throttler)
    names = ("a", "b")[: min(2, slots)]
    throttler.apply(_feed(*(replica_row(name, slots // len(names)) for name in names)))

    async def quiet(number: int) -> None:
        await here.until(number * every_s)
        await here.ask("quiet", 100)

    flood = [asyncio.create_task(here.ask("loud", loud_tokens)) for _ in range(FLOOD)]
    await _turns(6)
    await here.run(*(asyncio.create_task(quiet(number)) for number in range(ASKS)), *flood)
    throttler.check_integrity()
    return here


FAIR: list[tuple[int, int, float]] = [(1, 100, 2.3), (2, 100, 1.7), (4, 100, 1.0), (8, 100, 0.3), (8, 1000, 0.3)]


@pytest.mark.parametrize(("slots", "loud_tokens", "every_s"), FAIR, ids=str)
async def test_a_flood_costs_the_other_tenant_one_service_time(slots: int, loud_tokens: int, every_s: float) -> None:
    """At the 95th percentile, with one slot or many, for requests that are as large as the flood's or smaller. The
    flood is served whole, and no slot idles while anybody waits.
    """

    here = await _flooded(slots, loud_tokens, every_s)
    assert len(here.waits["quiet"]) == ASKS
    assert _p95(here.waits["quiet"]) <= SERVICE_S
    assert len(here.waits["loud"]) == FLOOD
    assert here.now_s <= (FLOOD + ASKS) / slots * SERVICE_S + 1


def _first_come(shared: object, bound: Bound) -> object:
    return Arrivals(shared, bound)  # type: ignore[arg-type]


def _one_tenant(shared: object, bound: Bound) -> object:
    """All are one tenant to it, as they were one version's."""
    return _Blind(shared, bound)  # type: ignore[arg-type]


class _Blind(FairQueue[object]):
    """Does not know tenants apart."""

    asks: ClassVar[dict[object, Ask]] = {}

    def put(self, entry: object, ask: Ask, deadline_s: float) -> None:
        self.asks[entry] = ask
        super().put(entry, Ask("all", ask.nbytes, ask.tokens, ask.rank), deadline_s)

    def take(self, may_take: Callable[[str], bool] = lambda _: True) -> tuple[object, Ask] | None:
        found = super().take(may_take)
        return None if found is None else (found[0], self.asks.pop(found[0]))

    def settle(self, ask: Ask, tokens: int) -> None:
        super().settle(Ask("all", ask.nbytes, ask.tokens, ask.rank), tokens)

    def pass_by(self, ask: Ask) -> None:
        super().pass_by(Ask("all", ask.nbytes, ask.tokens, ask.rank))


class _NoShares(SlotShares):
    """Anybody may have any slot."""

    def may_take(self, tenant: str, weight: int, slots: int, free: int, running: int) -> bool:
        return free > 0


@pytest.mark.parametrize("queue", [_first_come, _one_tenant])
async def test_another_order_would_be_seen(monkeypatch: pytest.MonkeyPatch, queue: Callable[..., object]) -> None:
    """Negative control: first come first served, and a queue that does not know tenants apart, are red."""

    monkeypatch.setattr(module, "FairQueue", queue)
    monkeypatch.setattr(module, "SlotShares", _NoShares)
    here = await _flooded(8, 100, 0.3)
    assert _p95(here.waits["quiet"]) > SERVICE_S
    assert min(here.waits["quiet"]) > 100 * SERVICE_S
