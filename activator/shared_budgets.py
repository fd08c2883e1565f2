"""`budgets.Leases` over a store that several activators share: parts of a budget are leased, so few requests ask.

It is asked once for all of a tenant who wait, in a task of its own. While the store is away nobody waits for it: what
is leased is used up, or its time is over, and then the tenant is refused, as others may spend what is left.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from activator.asking import Asking, Scripts, each
from activator.policy.budget import Spent
from activator.policy.budget_lease import LEASED_S, RENEW_S, BudgetLease, Question
from activator.shared_rates import Away
from contracts.errors import Refused
from contracts.traffic_errors import BudgetAway, BudgetSpent

AFTER_S: Final = 1.0

# Of each member what it leases, and until when, and under '' what the ledger was said to have at most; what is over is
# forgotten. In: our name, what the ledger has, what it lacks of ours, what is wanted, the budget, for how many seconds.
# Out: what we have now. What is spent stays, whatever the budget.
LEASE: Final = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local known = math.max(tonumber(ARGV[2]), tonumber(redis.call('HGET', KEYS[1], '') or '0'))
local free = ARGV[5] - known
redis.call('HDEL', KEYS[1], ARGV[1]) -- takes no memory, so that a full Redis goes on
local all = redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
  if all[at] ~= '' then
    local micros, ends = string.match(all[at + 1], '^(%d+) (.+)$')
    if tonumber(ends) <= now then
      redis.call('HDEL', KEYS[1], all[at])
    else
      free = free - micros
      if tonumber(ends) > now + ARGV[6] then -- given before Redis's clock stepped back
        redis.call('HSET', KEYS[1], all[at], string.format('%.0f %.6f', micros, now + ARGV[6]))
      end
    end
  end
end
local have = math.max(tonumber(ARGV[3]), math.min(tonumber(ARGV[4]), free))
redis.call('HSET', KEYS[1], '', string.format('%.0f', known))
if have > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %.6f', have, now + ARGV[6]))
end
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[6] * 1000))
return have
"""


class Store(Scripts, Protocol):
    """Runs scripts, and knows who else does."""

    @property
    def name(self) -> str:
        """This activator's, of which there is no other."""
        ...


@dataclass(slots=True)
class _Kept:
    """What is known of a tenant, as it was last asked for."""

    spent: Spent
    budget_micros: int
    lease: BudgetLease = field(default_factory=BudgetLease)


class SharedBudgets:
    """Of all tenants. `wall_s` is seconds since 1970, `clock` is monotonic seconds."""

    def __init__(
        self,
        store: Store,
        wall_s: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._wall_s = wall_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._asking: Asking[str] = Asking()  # for micro-units

    def __repr__(self) -> str:
        return f"<SharedBudgets tenants={len(self._kept)} asking={len(self._asking)} {self._store!r}>"

    async def cover(self, tenant: str, spent: Spent, budget_micros: int, micros: int) -> None:
        """See `budgets.Leases`. Waits for the store at most as long as it may take to answer, not while it is away."""
        while True:
            now_us, now_s = self._now_us(), self._clock()
            if not spent.covers(budget_micros, micros, now_us):
                raise Refused(BudgetSpent(budget_micros, micros))
            kept = self._of(tenant, spent, budget_micros)
            if kept.lease.covers(spent, micros, now_us, now_s):
                kept.lease.is_used = True
                return
            asking = self._asking.of(tenant)
            if asking is None:
                if not self._store.is_up:
                    raise Refused(BudgetAway(AFTER_S))
                if now_s < kept.lease.quiet_until_s:
                    raise Refused(BudgetSpent(budget_micros, micros))
                waiting = self._asking.waiting[tenant] + micros
                asking = self._start(tenant, kept, kept.lease.ask(spent, budget_micros, waiting, now_us, now_s))
            await self._asking.wait(tenant, asking, micros)

    async def run(self) -> None:
        """Renew what is used and give back what is not, until cancelled."""
        await each(RENEW_S, self.tend)

    async def tend(self) -> None:
        """Once; tenants one after another, as nobody waits for it."""
        for tenant, kept in list(self._kept.items()):
            if not self._store.is_up:
                return
            now_us = self._now_us()
            if tenant in self._asking:
                continue
            if kept.lease.is_idle(kept.spent, now_us):
                del self._kept[tenant]
                continue
            question = kept.lease.renewal(kept.spent, kept.budget_micros, now_us, self._clock())
            await asyncio.wait((self._start(tenant, kept, question),))

    async def close(self) -> None:
        """Give back what is not used, as far as that is quick, and wait for what is asked, which ends by itself."""
        for kept in self._kept.values():
            kept.lease.is_used = False
        await self._asking.close(self.tend())

    def _of(self, tenant: str, spent: Spent, budget_micros: int) -> _Kept:
        kept = self._kept.get(tenant)
        if kept is None or kept.spent is not spent:
            kept = self._kept[tenant] = _Kept(spent, budget_micros)
        kept.budget_micros = budget_micros
        return kept

    def _start(self, tenant: str, kept: _Kept, question: Question) -> "asyncio.Task[None]":
        return self._asking.start(tenant, self._lease(tenant, kept, question))

    async def _lease(self, tenant: str, kept: _Kept, asked: Question) -> None:
        key = f"kelvin:{{{tenant}}}:budget:{asked.month}"
        try:
            granted = await self._store.ask(
                LEASE, (key,), self._store.name, asked.known, asked.own, asked.want, kept.budget_micros,
                int(LEASED_S),
            )  # fmt: skip
            kept.lease.told(asked, int(granted), self._clock())
        except Away:
            pass  # what was leased is good until its time is over

    def _now_us(self) -> int:
        return int(self._wall_s() * 1e6)
