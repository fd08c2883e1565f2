"""Activators that spend one tenant's budget, and the ledger that gets their records. A token costs a micro-unit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from activator.limits.leased_quotas import SharedBudgetLeases
from activator.limits.redis_store import RedisStore, open_store
from activator.limits.tenant_budgets import BudgetReservation, TenantBudgets
from kelvin.contracts.accounting.spending import SpendingRow, TokenPrices
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import Feed
from tests.activator.clock import Clock
from tests.activator.redis_server import RedisServer
from tests.controlplane.usage_records import request_record

PRICES = TokenPrices(per_tokens=1, prompt=1, cached=1, completion=1, request=0)
END_US = 2_000_000_000
TENANT = "a"


@dataclass
class Ledger:
    """The ledger's sum of one tenant."""

    month: str = "2026-11"
    ends_at_us: int = END_US
    spent: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    tenant: str = TENANT

    def row(self) -> SpendingRow:
        """Return the current row."""
        return SpendingRow(
            tenant=self.tenant, month=self.month, ends_at_us=self.ends_at_us, spent_micros=self.spent, prices=PRICES,
            seen=dict(self.seen),
        )  # fmt: skip


@dataclass
class BudgetActivator:
    """One activator. Its clocks stand still unless they are set; a Redis has its own."""

    name: str
    budgets: TenantBudgets
    wall: Clock
    clock: Clock
    shared: SharedBudgetLeases | None = None
    store: RedisStore | None = None
    held: list[tuple[BudgetReservation, int]] = field(default_factory=list)
    records: list[int] = field(default_factory=list)  # costs of durable records that were not shipped
    written: int = 0
    tenant: str = TENANT  # the tenant of the last row

    def tell(self, row: SpendingRow) -> None:
        """Apply a row of the ledger."""
        self.tenant = row.tenant
        self.budgets.apply(Feed(revision=1, spending=(row,)))

    async def try_hold(self, budget: int, most: int) -> Failure | None:
        """Start a request that may cost `most`. Return why it was refused, or None."""
        try:
            hold = await self.budgets.hold(self.tenant, budget, most, 0)
        except Refused as refused:
            return refused.failure
        self.held.append((hold, most))
        return None

    def end(self, which: int, cost: int) -> None:
        """End a running request. Its record is durable."""
        hold, _ = self.held.pop(which)
        self.written += 1
        hold.settle(
            request_record(self.written, prompt_tokens=cost, cached_tokens=0, completion_tokens=0), self.written
        )
        self.records.append(cost)

    def ship(self, ledger: Ledger) -> None:
        """Ship all records to the ledger."""
        ledger.spent += sum(self.records)
        ledger.seen[self.name] = self.written
        self.records.clear()

    async def use(self, budget: int, most: int, cost: int) -> Failure | None:
        """Start and end a request."""
        if (why := await self.try_hold(budget, most)) is None:
            self.end(-1, cost)
        return why

    async def tend(self) -> None:
        """Do what an activator does each second."""
        if self.shared is not None:
            await self.shared.maintain()

    @property
    def committed(self) -> int:
        """What it has spent or holds that the ledger does not have."""
        return sum(self.records) + sum(most for _, most in self.held)


@asynccontextmanager
async def budget_activator(
    server: RedisServer, name: str = "one", answer_s: float = 20.0
) -> AsyncIterator[BudgetActivator]:
    """Yield one of several activators. `answer_s` is long, since a busy machine may answer late: only a paused Redis
    should count as down.
    """
    wall, clock = Clock(), Clock()
    async with open_store(server.url, name, answer_s) as store:
        shared = SharedBudgetLeases(store, wall, clock)
        yield BudgetActivator(name, TenantBudgets(name, shared, wall), wall, clock, shared, store)
        await shared.close()


@asynccontextmanager
async def alone() -> AsyncIterator[BudgetActivator]:
    """Yield an activator without a Redis."""
    wall, clock = Clock(), Clock()
    yield BudgetActivator("one", TenantBudgets("one", None, wall), wall, clock)


@asynccontextmanager
async def over_redis() -> AsyncIterator[BudgetActivator]:
    """Yield the only activator of a Redis."""
    with RedisServer() as server:
        async with asyncio.timeout(60), budget_activator(server) as here:
            yield here
