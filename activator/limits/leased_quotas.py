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
from activator.limits.single_flight import SingleFlight, StoreUnavailable, run_every
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import BudgetSpent, BudgetUnavailable, TenantBusy

if TYPE_CHECKING:  # the library is imported only if Redis is used
    from activator.limits.redis_store import RedisStore

AFTER_S: Final = 1.0

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
class _Kept(Generic[A]):
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
        self._kept: dict[str, _Kept[A]] = {}
        self._asking = SingleFlight()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} tenants={len(self._kept)} asking={len(self._asking)} {self._store!r}>"

    @abstractmethod
    def _use(self, tenant: str, account: A) -> QuotaUsage:
        """Return what the tenant uses of its quota."""

    async def _cover(self, tenant: str, account: A, limit: int, units: int) -> Coverage:
        """Return whether the quota covers `units` more. The caller must use them without awaiting first. Waits for the
        store at most for its time limit, and not while it is away. Safe to cancel.
        """
        has_waited = False

        def decide(is_asking: bool) -> Coverage | None:
            nonlocal has_waited
            kept = self._kept.get(tenant)
            if has_waited and (kept is None or kept.account is not account):
                # The tenant was removed, and may exist again with another account. This account gets no more updates of
                # its use, and two accounts that take turns would query for ever.
                return Coverage.AWAY
            has_waited = True
            return self._decide(tenant, account, limit, units, is_asking)

        def ask(waiting: int) -> Coroutine[Any, Any, None]:
            kept = self._of(tenant, account, limit)
            return self._ask(tenant, kept, kept.quota.ask(self._use(tenant, account), limit, waiting, self._clock()))

        return await self._asking.ask_until_decided(tenant, units, decide, ask)

    async def run(self) -> None:
        """Renew used quotas and give back unused ones, until cancelled."""
        await run_every(RENEW_S, self.tend)

    async def tend(self) -> None:
        """Renew or give back the quotas of all tenants once."""
        await self._asking.tend(self._kept, self._renew)

    async def close(self) -> None:
        """Give back unused quotas within CLOSE_S, then wait for running queries, which end by themselves."""
        for kept in self._kept.values():
            kept.quota.most = 0
        await self._asking.close(self.tend())

    def _decide(self, tenant: str, account: A, limit: int, units: int, is_asking: bool) -> Coverage | None:
        """Return the coverage, or None if the store must be queried or is being queried."""
        use, now_s = self._use(tenant, account), self._clock()
        if use.known + use.own + units > limit:
            return Coverage.SPENT
        quota = self._of(tenant, account, limit).quota
        if quota.try_use(use, units, now_s):
            return Coverage.COVERED
        if is_asking:
            return None
        if not self._store.is_up:
            has_share = self._terms.shares_alone and use.own + units <= equal_share(limit, self._store.members)
            return Coverage.COVERED if has_share and now_s >= quota.ends_s else Coverage.AWAY
        return Coverage.SPENT if now_s < quota.quiet_until_s else None

    def _renew(self, tenant: str) -> Coroutine[Any, Any, None] | None:
        kept = self._kept.get(tenant)  # None: dropped while another tenant's lease was renewed
        if kept is None or not self._store.is_up:
            return None
        use = self._use(tenant, kept.account)
        if kept.quota.is_idle(use):
            del self._kept[tenant]
            return None
        return self._ask(tenant, kept, kept.quota.renewal(use, kept.limit, self._clock()))

    async def _ask(self, tenant: str, kept: _Kept[A], question: LeaseRequest) -> None:
        use, terms = question.use, self._terms
        key = f"kelvin:{{{tenant}}}:{self._kind}" + (f":{use.period}" if use.period else "")
        try:
            granted = await self._store.ask(
                LEASE, (key,), self._store.name, use.known, question.must_keep, question.want, kept.limit,
                str(terms.leased_s),
            )  # fmt: skip
            kept.quota.record_grant(question, int(granted), self._clock())
        except StoreUnavailable:
            pass  # the lease stays valid until it expires

    def _of(self, tenant: str, account: A, limit: int) -> _Kept[A]:
        kept = self._kept.get(tenant)
        if kept is None or kept.account is not account:
            kept = self._kept[tenant] = _Kept(account, limit, HeldQuota(self._terms))
        kept.limit = limit
        return kept


class SharedConcurrencyLimiter(LeasedQuotas[None]):
    """A `ConcurrencyLimiter` for several activators."""

    def __init__(
        self, store: "RedisStore", clock: Callable[[], float] = time.monotonic, terms: LeaseTerms = PERMITS
    ) -> None:
        super().__init__(store, "places", terms, clock)
        self._inside: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<SharedConcurrencyLimiter tenants={len(self._kept)} inside={self._inside.total()} {self._store!r}>"

    async def enter(self, tenant: str, limit: int | None) -> Permit:
        """Return a block that counts one more request. Raises Refused(TenantBusy). May wait for the store."""
        if limit is not None and await self._cover(tenant, None, limit, 1) is not Coverage.COVERED:
            raise Refused(TenantBusy(limit, RETRY_AFTER_S))
        return Permit(self._inside, tenant, None)

    def _use(self, tenant: str, _: None) -> QuotaUsage:
        return QuotaUsage(self._inside[tenant])


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

    async def cover(self, tenant: str, spent: TenantSpending, budget_micros: int, micros: int) -> None:
        """Wait until the leased budget covers a request that may cost `micros`. Raises Refused(BudgetUnavailable |
        BudgetSpent). A budget that is used up admits no request, not even a free one.
        """
        cover = await self._cover(tenant, spent, budget_micros, max(1, micros))
        if cover is Coverage.AWAY:
            raise Refused(BudgetUnavailable(AFTER_S))
        if cover is Coverage.SPENT:
            raise Refused(BudgetSpent(budget_micros, micros))

    def forget(self, tenant: str) -> None:
        """Stop renewing the tenant's lease."""
        self._kept.pop(tenant, None)

    def _use(self, _: str, spent: TenantSpending) -> QuotaUsage:
        now_us = int(self._wall_s() * 1e6)
        own, known = spent.own_micros(now_us), spent.known_micros(now_us)
        return QuotaUsage(own, known, spent.handed_over_micros, spent.month_at(now_us))
