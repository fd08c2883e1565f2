"""Limits of a tenant (requests at once, per minute, budget per month), asked for one request: on its entry, once its
body is known, and at its end. A tenant without such limits costs a test for None each.
"""

from collections.abc import Awaitable

from activator.budgets import Budgets
from activator.call import Call
from activator.exchange import Exchange
from activator.policy.body import Estimate
from activator.rates import Rates
from activator.shares import Entrance, Place
from contracts.control import TenantLimits


class Allowances:
    """The limits of all tenants: requests at once, rates and budgets."""

    def __init__(self, entrance: Entrance, rates: Rates, budgets: Budgets) -> None:
        self._entrance = entrance
        self._rates = rates
        self._budgets = budgets

    def __repr__(self) -> str:
        return f"<Allowances {self._rates!r} {self._budgets!r}>"

    def place(self, tenant: str, own: TenantLimits) -> Awaitable[Place]:
        """Return a block that counts one more request of the tenant. Raises Refused(TenantBusy)."""
        return self._entrance.enter(tenant, own.requests)

    async def enter(self, exchange: Exchange, tenant: str, own: TenantLimits) -> None:
        """Check limits before the body is read. Raises Refused: BudgetSpent, RateLimited."""
        if own.budget_micros is not None:
            self._budgets.check(tenant, own.budget_micros)
        if own.rpm is not None or own.tpm is not None:
            await self._rates.enter(exchange.rates, tenant, own)

    async def reserve(self, call: Call, most: Estimate) -> None:
        """Reserve what the request may take, in place of what it held before. Call `settle` at its end.

        A limit per minute catches up with a prompt that was longer than estimated; a budget can't. Raises as `enter`,
        and TooLargeForRate, BudgetAway.
        """
        tenant, own = call.account.principal.tenant, call.own
        if own.budget_micros is not None:
            if call.account.hold is not None:
                call.account.hold.release()
            call.account.hold = await self._budgets.hold(tenant, own.budget_micros, most.longest, most.output)
        if own.tpm is not None and most.tokens:
            if call.reserved is not None:
                call.reserved.settle(0)
            call.reserved = await self._rates.reserve(call.exchange.rates, tenant, own.tpm, most.tokens)

    def settle(self, call: Call) -> None:
        """Settle a request that has ended. Its record is durable, or it has none."""
        if call.account.hold is not None:
            call.account.hold.release()  # nothing, where there is a record
        if call.reserved is not None:
            # A replica finds out that a prompt is too long by encoding it: that work counts.
            call.reserved.settle(call.computed_tokens or call.encoded_in_vain)
