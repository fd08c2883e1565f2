"""Choose where tenants' limits are counted: in this process, or in a Redis that several activators share."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from activator.limits.concurrency_limits import ConcurrencyLimiter, LocalConcurrencyLimiter
from activator.limits.leased_quotas import SharedBudgetLeases, SharedConcurrencyLimiter
from activator.limits.rate_limits import REQUESTS, TOKENS, RateLimits
from activator.limits.redis_rate_counter import RedisRateCounter
from kelvin.contracts.setting_parser import BadSetting
from kelvin.process.loops import Body
from kelvin.telemetry.policy.instruments import MetricsPage

if TYPE_CHECKING:
    from activator.limits.redis_store import RedisStore


@dataclass(frozen=True, slots=True)
class LimitCounters:
    """The counters of limits, and the loops that must run for them."""

    rates: RateLimits
    concurrency_limiter: ConcurrencyLimiter
    store: "RedisStore | None" = None
    budgets: SharedBudgetLeases | None = None
    loops: Mapping[str, Body] = field(default_factory=dict)

    def activator_names(self) -> tuple[str, ...]:
        """Return the names of the activators that share the store, as far as is known; () without a store."""
        return () if self.store is None else self.store.member_names

    def activator_count(self) -> int | None:
        """Return how many activators share the store, this one included, or None if that is unknown now."""
        return self.store.member_count if self.store is not None and self.store.is_up else None


@asynccontextmanager
async def open_limit_counters(url: str | None, name: str, page: MetricsPage) -> AsyncIterator[LimitCounters]:
    """Open the counters that the settings name. Raises BadSetting. Imports the Redis library only if needed."""
    if url is None:
        yield LimitCounters(RateLimits(), LocalConcurrencyLimiter())
        return
    try:
        from activator.limits.redis_store import open_store
    except ImportError as missing:
        raise BadSetting(
            "KELVIN_REDIS", url.partition(":")[0], "needs the extra: pip install 'kelvin-serving[redis]'"
        ) from missing
    async with open_store(url, name) as store:
        page.gauge("kelvin_redis_connected", "Whether Redis answers.", lambda: store.is_up)
        help = "Whether Redis answers but refuses writes: it is full, read-only or can't save."
        page.gauge("kelvin_redis_refuses_writes", help, lambda: store.write_refusal is not None)
        page.gauge("kelvin_redis_members", "Activators that share Redis.", lambda: store.member_count)
        requests, tokens, permits = (
            RedisRateCounter(store, REQUESTS),
            RedisRateCounter(store, TOKENS),
            SharedConcurrencyLimiter(store),
        )
        budgets = SharedBudgetLeases(store)
        loops: dict[str, Body] = {
            "redis members": store.run, "request rates": requests.run, "token rates": tokens.run,
            "places": permits.run, "budgets": budgets.run,
        }  # fmt: skip
        try:
            yield LimitCounters(RateLimits(requests, tokens), permits, store, budgets, loops)
        finally:
            await budgets.close()
            await permits.close()
            await requests.close()
            await tokens.close()
