"""Check a tenant's limits for one request: concurrent requests, rates per minute, budget per month. Limits are checked
on entry, once the body is known, and at the end. An unset limit costs one test for None.
"""

from collections.abc import Awaitable

from activator.http.exchange import Exchange
from activator.limits.concurrency_limits import ConcurrencyLimiter, Permit
from activator.limits.rate_limits import RateLimits
from activator.limits.tenant_budgets import TenantBudgets
from activator.request.inference_request import InferenceRequest
from activator.routing.policy.request_body import Estimate
from kelvin.contracts.serving.control_messages import TenantLimits


class TenantLimiter:
    """The limits of all tenants: concurrent requests, rates and budgets."""

    def __init__(self, concurrency_limiter: ConcurrencyLimiter, rates: RateLimits, budgets: TenantBudgets) -> None:
        self._concurrency_limiter = concurrency_limiter
        self._rates = rates
        self._budgets = budgets

    def __repr__(self) -> str:
        return f"<TenantLimiter {self._rates!r} {self._budgets!r}>"

    def acquire_permit(self, tenant: str, tenant_limits: TenantLimits) -> Awaitable[Permit]:
        """Return a block that counts one more concurrent request of the tenant. Entering raises Refused(TenantBusy)."""
        return self._concurrency_limiter.acquire_permit(tenant, tenant_limits.requests)

    async def check_on_arrival(self, exchange: Exchange, tenant: str, tenant_limits: TenantLimits) -> None:
        """Check limits before the body is read. Raises Refused(BudgetSpent | RateLimited)."""
        if tenant_limits.budget_micros is not None:
            self._budgets.check(tenant, tenant_limits.budget_micros)
        if tenant_limits.rpm is not None or tenant_limits.tpm is not None:
            await self._rates.count_request(exchange.rate_headers, tenant, tenant_limits)

    async def reserve(self, inference_request: InferenceRequest, estimate: Estimate) -> None:
        """Reserve what the request may use, replacing its earlier reservation. Call `settle` at its end.

        If the prompt is longer than estimated, a limit per minute catches up later; a budget can't, so it reserves the
        longest possible prompt. Raises Refused(RateLimited | TooLargeForRate | BudgetSpent | BudgetUnavailable).
        """
        tenant, tenant_limits = inference_request.account.principal.tenant, inference_request.tenant_limits
        if tenant_limits.budget_micros is not None:
            if inference_request.account.budget_reservation is not None:
                inference_request.account.budget_reservation.release()
            inference_request.account.budget_reservation = await self._budgets.hold(
                tenant, tenant_limits.budget_micros, estimate.longest, estimate.output
            )
        if tenant_limits.tpm is not None and estimate.tokens:
            if inference_request.token_reservation is not None:
                inference_request.token_reservation.settle(0)
            inference_request.token_reservation = await self._rates.reserve(
                inference_request.exchange.rate_headers, tenant, tenant_limits.tpm, estimate.tokens
            )

    def settle(self, inference_request: InferenceRequest) -> None:
        """Settle a request that has ended. Its record is durable, or it has none."""
        if inference_request.account.budget_reservation is not None:
            inference_request.account.budget_reservation.release()  # does nothing if there is a record
        if inference_request.token_reservation is not None:
            # A replica encodes a prompt to find out that it is too long. That work counts.
            inference_request.token_reservation.settle(
                inference_request.computed_tokens or inference_request.rejected_prompt_tokens
            )
