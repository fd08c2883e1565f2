"""Tenants' quotas that several activators share in Redis: concurrent requests, and monthly budgets.

An activator leases parts of a quota, so few requests need Redis. One query serves all waiting requests of a tenant
(single-flight), in a task of its own. No request waits for Redis while it is away.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from activator.limits.concurrency_limits import RETRY_AFTER_S, Permit
from activator.limits.policy.held_quota import (
    BUDGETS,
    PERMITS,
    RENEW_S,
    HeldQuota,
    LeaseRequest,
    LeaseTerms,
    QuotaUsage,
    equal_share,
)
from activator.limits.policy.monthly_budget import TenantSpending
from activator.limits.single_flight import SingleFlight
from activator.limits.store_errors import StoreUnavailable
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import BudgetSpent, BudgetUnavailable, TenantBusy
from kelvin.process.loops import run_every

if TYPE_CHECKING:  # the library is imported only if Redis is used
    from activator.limits.redis_store import RedisStore

# KEYS[1] maps each activator to its lease and the lease's end, and '' to the largest known use. An expired lease is
# deleted. A lease that seems to last longer than a new one was granted before Redis's clock stepped back, and is cut.
# Input: our name, the known use, what stays leased whatever the limit, what is wanted, the limit, a lease's seconds.
# Output: our lease now.
LEASE: Final = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local known = math.max(tonumber(ARGV[2]), tonumber(redis.call('HGET', KEYS[1], '') or '0'))
local free = ARGV[5] - known
redis.call('HDEL', KEYS[1], ARGV[1]) -- needs no memory, so a full Redis runs it
local all = redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
  if all[at] ~= '' then
    local units, ends = string.match(all[at + 1], '^(%d+) (.+)$')
    if tonumber(ends) <= now then
      redis.call('HDEL', KEYS[1], all[at])
    else
      free = free - units
      if tonumber(ends) > now + ARGV[6] then
        redis.call('HSET', KEYS[1], all[at], string.format('%.0f %.6f', units, now + ARGV[6]))
      end
    end
  end
end
local have = math.max(tonumber(ARGV[3]), math.min(tonumber(ARGV[4]), free))
if known > 0 then
  redis.call('HSET', KEYS[1], '', string.format('%.0f', known))
end
if have > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %.6f', have, now + ARGV[6]))
end
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[6] * 1000))
return have
"""

A = TypeVar("A")


class Coverage(Enum):
    """Whether a tenant's quota covers a request."""

    COVERED = auto()
    SPENT = auto()  # the limit is used up, or other activators hold the rest
    AWAY = auto()  # unknown without the store


@dataclass(slots=True)
class _TenantQuota(Generic[A]):
    """A tenant's held quota, with the account and limit of the last request."""

    account: A
    limit: int
    quota: HeldQuota


class LeasedQuotas(ABC, Generic[A]):
    """One kind of quota for all tenants. `clock` returns monotonic seconds."""

    def __init__(self, store: "RedisStore", kind: str, terms: LeaseTerms, clock: Callable[[], float]) -> None:
        self._store = store
        self._kind = kind
        self._terms = terms
        self._clock = clock
        self._quotas: dict[str, _TenantQuota[A]] = {}
        self._queries = SingleFlight()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} tenants={len(self._quotas)} querying={len(self._queries)} {self._store!r}>"

    @abstractmethod
    def _usage(self, tenant: str, account: A) -> QuotaUsage:
        """Return what the tenant uses of its quota."""

    async def _cover(self, tenant: str, account: A, limit: int, units: int) -> Coverage:
        """Return whether the quota covers `units` more. The caller must use them without awaiting first. Waits for the
        store at most for its time limit, and not while it is away. Safe to cancel.
        """
        has_waited = False

        def decide(is_querying: bool) -> Coverage | None:
            nonlocal has_waited
            tenant_quota = self._quotas.get(tenant)
            if has_waited and (tenant_quota is None or tenant_quota.account is not account):
                # The tenant was removed, and may exist again with another account. This account gets no more updates of
                # its use, and two accounts that take turns would query for ever.
                return Coverage.AWAY
            has_waited = True
            return self._decide(tenant, account, limit, units, is_querying)

        def build_query(waiting: int) -> Coroutine[Any, Any, None]:
            tenant_quota, usage = self._ensure_quota(tenant, account, limit), self._usage(tenant, account)
            lease_request = tenant_quota.quota.build_lease_request(usage, limit, waiting, self._clock())
            return self._query_store(tenant, tenant_quota, lease_request)

        return await self._queries.query_until_decided(tenant, units, decide, build_query)

    async def run(self) -> None:
        """Renew used quotas and give back unused ones, until cancelled."""
        await run_every(RENEW_S, self.maintain)

    async def maintain(self) -> None:
        """Renew or give back the quotas of all tenants once."""
        await self._queries.maintain(self._quotas, self._renew)

    async def close(self) -> None:
        """Give back unused quotas within CLOSE_S, then wait for running queries, which end by themselves."""
        for tenant_quota in self._quotas.values():
            tenant_quota.quota.peak = 0
        await self._queries.close(self.maintain())

    def _decide(self, tenant: str, account: A, limit: int, units: int, is_querying: bool) -> Coverage | None:
        """Return the coverage, or None if the store must be queried or is being queried."""
        usage, now_s = self._usage(tenant, account), self._clock()
        if usage.settled + usage.local + units > limit:
            return Coverage.SPENT
        quota = self._ensure_quota(tenant, account, limit).quota
        if quota.try_use(usage, units, now_s):
            return Coverage.COVERED
        if is_querying:
            return None
        if not self._store.is_up:
            may_use_share = self._terms.uses_share_without_store and now_s >= quota.ends_s
            fits = usage.local + units <= equal_share(limit, self._store.member_count)
            return Coverage.COVERED if may_use_share and fits else Coverage.AWAY
        return Coverage.SPENT if now_s < quota.quiet_until_s else None

    def _renew(self, tenant: str) -> Coroutine[Any, Any, None] | None:
        tenant_quota = self._quotas.get(tenant)  # None: dropped while another tenant's lease was renewed
        if tenant_quota is None or not self._store.is_up:
            return None
        usage = self._usage(tenant, tenant_quota.account)
        if tenant_quota.quota.is_idle(usage):
            del self._quotas[tenant]
            return None
        renewal = tenant_quota.quota.build_renewal_request(usage, tenant_quota.limit, self._clock())
        return self._query_store(tenant, tenant_quota, renewal)

    async def _query_store(self, tenant: str, tenant_quota: _TenantQuota[A], lease_request: LeaseRequest) -> None:
        usage = lease_request.usage
        key = f"kelvin:{{{tenant}}}:{self._kind}" + (f":{usage.period}" if usage.period else "")
        try:
            granted = await self._store.run_script(
                LEASE, (key,), self._store.name, usage.settled, lease_request.must_keep, lease_request.want,
                tenant_quota.limit, str(self._terms.leased_s),
            )  # fmt: skip
            tenant_quota.quota.record_grant(lease_request, int(granted), self._clock())
        except StoreUnavailable:
            pass  # the lease stays valid until it expires

    def _ensure_quota(self, tenant: str, account: A, limit: int) -> _TenantQuota[A]:
        tenant_quota = self._quotas.get(tenant)
        if tenant_quota is None or tenant_quota.account is not account:
            tenant_quota = self._quotas[tenant] = _TenantQuota(account, limit, HeldQuota(self._terms))
        tenant_quota.limit = limit
        return tenant_quota


class SharedConcurrencyLimiter(LeasedQuotas[None]):
    """A `ConcurrencyLimiter` for several activators."""

    def __init__(
        self, store: "RedisStore", clock: Callable[[], float] = time.monotonic, terms: LeaseTerms = PERMITS
    ) -> None:
        super().__init__(store, "places", terms, clock)
        self._running: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<SharedConcurrencyLimiter tenants={len(self._quotas)} running={self._running.total()} {self._store!r}>"

    async def acquire_permit(self, tenant: str, limit: int | None) -> Permit:
        """Return a block that counts one more request. Raises Refused(TenantBusy). May wait for the store."""
        if limit is not None and await self._cover(tenant, None, limit, 1) is not Coverage.COVERED:
            raise Refused(TenantBusy(limit, RETRY_AFTER_S))
        return Permit(self._running, tenant, None)

    def _usage(self, tenant: str, _: None) -> QuotaUsage:
        return QuotaUsage(self._running[tenant])


class SharedBudgetLeases(LeasedQuotas[TenantSpending]):
    """The `BudgetLeases` of several activators. `wall_s` returns seconds since 1970. While the store is away, a lease
    can be used until it expires. After that the tenant is refused, since other activators may spend the rest.
    """

    def __init__(
        self,
        store: "RedisStore",
        wall_s: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, "budget", BUDGETS, clock)
        self._wall_s = wall_s

    async def cover(self, tenant: str, spending: TenantSpending, budget_micros: int, micros: int) -> None:
        """Wait until the leased budget covers a request that may cost `micros`. Raises Refused(BudgetUnavailable |
        BudgetSpent). A budget that is used up admits no request, not even a free one.
        """
        coverage = await self._cover(tenant, spending, budget_micros, max(1, micros))
        if coverage is Coverage.AWAY:
            raise Refused(BudgetUnavailable(RETRY_AFTER_S))
        if coverage is Coverage.SPENT:
            raise Refused(BudgetSpent(budget_micros, micros))

    def stop_renewing(self, tenant: str) -> None:
        """Stop renewing the tenant's lease."""
        self._quotas.pop(tenant, None)

    def _usage(self, _: str, spending: TenantSpending) -> QuotaUsage:
        now_us = int(self._wall_s() * 1e6)
        local, settled = spending.local_micros(now_us), spending.ledger_micros(now_us)
        return QuotaUsage(local, settled, spending.handed_over_micros, spending.month_at(now_us))
