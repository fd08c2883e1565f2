"""Monthly budgets of tenants: refuse what a budget does not cover, and track spending. The ledger is authoritative."""

import time
from collections.abc import Callable
from typing import Protocol

from activator.limits.policy.monthly_budget import TenantSpending
from kelvin.contracts.accounting.spending import TokenPrices
from kelvin.contracts.accounting.usage import RequestRecord, is_charged
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.traffic_errors import BudgetSpent


class BudgetLeases(Protocol):
    """Leases this activator's part of budgets that several activators share."""

    async def cover(self, tenant: str, spending: TenantSpending, budget_micros: int, micros: int) -> None:
        """Wait until the leased budget covers a request that may cost `micros`. The caller must hold it without
        awaiting first. Raises Refused(BudgetSpent | BudgetUnavailable). Safe to cancel.
        """
        ...

    def stop_renewing(self, tenant: str) -> None:
        """Stop renewing the tenant's lease: without feed rows, nothing tells which records the ledger has."""
        ...


class BudgetReservation:
    """The most that a request may cost. End it once: by `settle` with its record, or by `release` without one."""

    __slots__ = ("_held_micros", "_prices", "_spending")

    def __init__(self, spending: TenantSpending, prices: TokenPrices, held_micros: int) -> None:
        self._spending = spending
        self._prices = prices
        self._held_micros: int | None = held_micros

    def settle(self, record: RequestRecord, sequence: int) -> None:
        """Charge the request's record, which is durable under that sequence."""
        held, self._held_micros = self._held_micros, None
        if held is None:
            return
        micros = 0
        if is_charged(record.outcome, record.completion_tokens):
            micros = self._prices.cost_micros(record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        self._spending.settle(held, micros, sequence, record.ended_at_us)

    def release(self) -> None:
        """Give the reservation back. Does nothing after `settle`."""
        held, self._held_micros = self._held_micros, None
        if held is not None:
            self._spending.release(held)


class TenantBudgets:
    """Budgets of all tenants that have one according to the feed. `source` is our spool's name. `leases` is set if
    other activators spend from the same budgets.
    """

    def __init__(
        self, source: str, leases: BudgetLeases | None = None, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._source = source
        self._leases = leases
        self._wall_s = wall_s
        self._spending_by_tenant: dict[str, TenantSpending] = {}

    def __repr__(self) -> str:
        return f"<TenantBudgets tenants={len(self._spending_by_tenant)}>"

    def apply(self, feed: Feed) -> None:
        """Apply the ledger's sums from a feed message. Reservations of running requests stay."""
        known_tenants = set(self._spending_by_tenant) if feed.full else set(feed.removed_tenants)
        if feed.full:
            reported = {row.tenant for row in feed.spending}
            self._spending_by_tenant = {
                name: each for name, each in self._spending_by_tenant.items() if name in reported or each.held_micros
            }
        for row in feed.spending:
            self._ensure_spending(row.tenant).apply_ledger_row(row)
        for tenant in feed.removed_tenants:
            self._spending_by_tenant.pop(tenant, None)
        if self._leases is not None:
            for tenant in known_tenants - self._spending_by_tenant.keys():
                self._leases.stop_renewing(tenant)

    def check(self, tenant: str, budget_micros: int) -> None:
        """Refuse if the budget is used up. Raises Refused(BudgetSpent)."""
        if not self._ensure_spending(tenant).try_hold(budget_micros, 0, self._now_us()):
            raise Refused(BudgetSpent(budget_micros))

    async def hold(
        self, tenant: str, budget_micros: int, prompt_tokens: int, completion_tokens: int
    ) -> BudgetReservation:
        """Hold the most that a request may cost. Raises as `check`, and Refused(BudgetUnavailable). Safe to cancel."""
        spending = self._ensure_spending(tenant)
        prices = _FREE if spending.row is None else spending.row.prices
        micros = prices.cost_micros(prompt_tokens, 0, completion_tokens)
        if self._leases is not None and spending.row is not None:
            await self._leases.cover(tenant, spending, budget_micros, micros)
        if not spending.try_hold(budget_micros, micros, self._now_us()):
            raise Refused(BudgetSpent(budget_micros, micros))
        return BudgetReservation(spending, prices, micros)

    def _ensure_spending(self, tenant: str) -> TenantSpending:
        spending = self._spending_by_tenant.get(tenant)
        if spending is None:
            spending = self._spending_by_tenant[tenant] = TenantSpending(self._source)
        return spending

    def _now_us(self) -> int:
        return int(self._wall_s() * 1e6)


_FREE = TokenPrices(per_tokens=1, prompt=0, cached=0, completion=0, request=0)  # until the first row of the ledger
