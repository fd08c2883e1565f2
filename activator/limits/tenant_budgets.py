"""Monthly budgets of tenants: what one does not cover is refused, what is spent followed. The ledger is the truth."""

import time
from collections.abc import Callable
from typing import Final, Protocol

from activator.limits.policy.monthly_budget import TenantSpending
from kelvin.contracts.accounting.spending import TokenPrices
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.traffic_errors import BudgetSpent

OK: Final = "ok"


def is_charged(outcome: str | None, completion_tokens: int) -> bool:
    """Return whether the ledger charges a request: it succeeded, or some of its answer was delivered."""
    return outcome == OK or completion_tokens > 0


class BudgetLeases(Protocol):
    """What this one of several activators may spend."""

    async def cover(self, tenant: str, spent: TenantSpending, budget_micros: int, micros: int) -> None:
        """Returns in the moment in which what is leased covers a request that may cost so much: who holds it does so
        without waiting. Raises Refused: BudgetSpent, BudgetAway. Cancelling leaves nothing behind.
        """
        ...

    def forget(self, tenant: str) -> None:
        """Renew nothing for the tenant: nobody tells any more which of its records the ledger has."""
        ...


class BudgetReservation:
    """What a request may cost, until its record says what it did, or there will be none. One of both, once."""

    __slots__ = ("_held_micros", "_prices", "_spent")

    def __init__(self, spent: TenantSpending, prices: TokenPrices, held_micros: int) -> None:
        self._spent = spent
        self._prices = prices
        self._held_micros: int | None = held_micros

    def settle(self, record: RequestRecord, sequence: int) -> None:
        """It is durable, under that sequence."""
        held, self._held_micros = self._held_micros, None
        if held is None:
            return
        micros = 0
        if is_charged(record.outcome, record.completion_tokens):
            micros = self._prices.cost_micros(record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        self._spent.settle(held, micros, sequence, record.ended_at_us)

    def release(self) -> None:
        """Give it back. Nothing, once it was settled."""
        held, self._held_micros = self._held_micros, None
        if held is not None:
            self._spent.release(held)


class TenantBudgets:
    """Of all tenants of which the feed tells that they have one. `source` is our spool's name; `leases`: where other
    activators spend of the same budgets.
    """

    def __init__(
        self, source: str, leases: BudgetLeases | None = None, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._source = source
        self._leases = leases
        self._wall_s = wall_s
        self._spent: dict[str, TenantSpending] = {}

    def __repr__(self) -> str:
        return f"<TenantBudgets tenants={len(self._spent)}>"

    def apply(self, line: Feed) -> None:
        """Take over what the ledger says; requests under way stay held."""
        before = set(self._spent) if line.full else set(line.removed_tenants)
        if line.full:
            told = {row.tenant for row in line.spending}
            self._spent = {name: each for name, each in self._spent.items() if name in told or each.held_micros}
        for row in line.spending:
            self._of(row.tenant).apply_ledger_row(row)
        for tenant in line.removed_tenants:
            self._spent.pop(tenant, None)
        if self._leases is not None:
            for tenant in before - self._spent.keys():
                self._leases.forget(tenant)

    def check(self, tenant: str, budget_micros: int) -> None:
        """Raises Refused(BudgetSpent) where nothing is left."""
        if not self._of(tenant).try_hold(budget_micros, 0, self._now_us()):
            raise Refused(BudgetSpent(budget_micros))

    async def hold(
        self, tenant: str, budget_micros: int, prompt_tokens: int, completion_tokens: int
    ) -> BudgetReservation:
        """Hold the most that a request may cost. Raises as `check`, and BudgetAway. Cancelling leaves nothing held."""
        spent = self._of(tenant)
        prices = _FREE if spent.row is None else spent.row.prices
        micros = prices.cost_micros(prompt_tokens, 0, completion_tokens)
        if self._leases is not None and spent.row is not None:
            await self._leases.cover(tenant, spent, budget_micros, micros)
        if not spent.try_hold(budget_micros, micros, self._now_us()):
            raise Refused(BudgetSpent(budget_micros, micros))
        return BudgetReservation(spent, prices, micros)

    def _of(self, tenant: str) -> TenantSpending:
        found = self._spent.get(tenant)
        if found is None:
            found = self._spent[tenant] = TenantSpending(self._source)
        return found

    def _now_us(self) -> int:
        return int(self._wall_s() * 1e6)


_FREE = TokenPrices(per_tokens=1, prompt=0, cached=0, completion=0, request=0)  # before the ledger said anything
