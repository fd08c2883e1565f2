"""A `RateCounter` in Redis for several activators. Each takes blocks of a bucket, so few requests need Redis.

One query serves all requests that wait for a block (single-flight), in a task of its own. No request waits for Redis
while it is away.
"""

import time
from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from activator.limits.policy.gcra import RateStatus
from activator.limits.policy.held_quota import equal_share
from activator.limits.policy.token_block import RefillRequest, TokenBlock
from activator.limits.single_flight import SingleFlight
from activator.limits.store_errors import StoreUnavailable
from kelvin.process.loops import run_every

if TYPE_CHECKING:  # the library is imported only if Redis is used
    from activator.limits.redis_store import RedisStore

MAINTAIN_S: Final = 0.5  # interval between checks for expired blocks


# A bucket (GCRA) stores how many seconds it needs to be full, and the time of that value. A full bucket has no key. If
# Redis's clock steps back, no time has passed, so no tenant loses anything. Input: limit per minute, what is given back
# (below 0: owed), what is needed, what is wanted. Output: what is granted, seconds until the bucket is full.
TAKE: Final = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local per = 60 / ARGV[1]
local lacks, at = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) (%S+)$')
lacks = math.max(0, (lacks or 0) - math.max(0, now - (at or now)))
lacks = math.max(0, lacks - ARGV[2] * per)
local room = math.floor(ARGV[1] - lacks / per + 0.000001)
local granted = 0
if tonumber(ARGV[4]) > 0 and room >= tonumber(ARGV[3]) then
  granted = math.max(0, math.min(room, tonumber(ARGV[4])))
end
lacks = lacks + granted * per
redis.call('DEL', KEYS[1]) -- needs no memory, so a full Redis runs it
if lacks > 0 then
  redis.call('SET', KEYS[1], string.format('%.6f %.6f', lacks, now), 'PX', math.ceil(lacks * 1000))
end
return {granted, string.format('%.6f', lacks)}
"""


class RedisRateCounter:
    """Counts one kind of limit for all tenants. `clock` returns monotonic seconds."""

    def __init__(self, store: "RedisStore", kind: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._kind = kind
        self._clock = clock
        self._blocks: dict[str, TokenBlock] = {}
        self._limits: dict[str, int] = {}  # each tenant's limit at its last request
        self._queries = SingleFlight()

    def __repr__(self) -> str:
        return (
            f"<RedisRateCounter {self._kind} tenants={len(self._blocks)} querying={len(self._queries)} {self._store!r}>"
        )

    async def hold(self, tenant: str, limit: int, units: int) -> RateStatus:
        """Hold `units`, unless the returned status says how long to wait. Safe to cancel. Waits for Redis at most for
        its time limit, and not while it is away.
        """

        def build_query(waiting: int) -> Coroutine[Any, Any, None]:
            block = self._ensure_block(tenant, limit)
            return self._query_store(
                tenant, block, limit, block.build_refill_request(limit, units, waiting, self._clock())
            )

        return await self._queries.query_until_decided(
            tenant, units, partial(self._decide, tenant, limit, units), build_query
        )

    def settle(self, tenant: str, limit: int, held: int, used: int) -> None:
        """Charge `used` in place of `held`."""
        self._ensure_block(tenant, limit).settle(held, used, self._clock())

    def rate_status(self, tenant: str, limit: int) -> RateStatus:
        """Return the state as Redis last reported it, plus the block here."""
        return self._ensure_block(tenant, limit).rate_status(limit, self._clock())

    async def run(self) -> None:
        """Give back expired blocks and pay debts, until cancelled."""
        await run_every(MAINTAIN_S, self.maintain)

    async def maintain(self, ahead_s: float = 0.0) -> None:
        """Give back blocks that expire within `ahead_s`, and drop idle tenants."""
        await self._queries.maintain(self._blocks, partial(self._give_back, ahead_s))

    async def close(self) -> None:
        """Give back all blocks within CLOSE_S, then wait for running queries, which end by themselves."""
        await self._queries.close(self.maintain(inf))

    def _decide(self, tenant: str, limit: int, units: int, is_querying: bool) -> RateStatus | None:
        """Return the status, or None if Redis must be queried or is being queried."""
        block, now_s = self._ensure_block(tenant, limit), self._clock()
        if block.try_hold(units, now_s):
            return block.rate_status(limit, now_s)
        if is_querying:
            return None
        if not self._store.is_up:
            return block.hold_locally(equal_share(limit, self._store.member_count), units, now_s)
        if (refill_pause_s := block.refill_pause_s(units, now_s)) is not None:
            lacks = units - block.rate_status(limit, now_s).remaining
            return block.rate_status(limit, now_s, max(refill_pause_s, lacks * 60 / limit))
        return None

    def _give_back(self, ahead_s: float, tenant: str) -> Coroutine[Any, Any, None] | None:
        block, limit, now_s = self._blocks[tenant], self._limits[tenant], self._clock()
        if block.is_idle(now_s):
            del self._blocks[tenant], self._limits[tenant]
            return None
        if not self._store.is_up:
            return None
        refill_request = block.build_return_request(limit, now_s, ahead_s)
        return None if refill_request is None else self._query_store(tenant, block, limit, refill_request)

    async def _query_store(self, tenant: str, block: TokenBlock, limit: int, refill_request: RefillRequest) -> None:
        try:
            key = f"kelvin:{{{tenant}}}:{self._kind}"
            granted, full_in_s = await self._store.run_script(
                TAKE, (key,), limit, refill_request.give, refill_request.need, refill_request.want
            )
        except StoreUnavailable:
            block.record_unanswered(refill_request)
        except BaseException:
            block.record_unanswered(refill_request)
            raise
        else:
            block.record_refill(refill_request, int(granted), float(full_in_s), self._clock())

    def _ensure_block(self, tenant: str, limit: int) -> TokenBlock:
        self._limits[tenant] = limit
        block = self._blocks.get(tenant)
        if block is None:
            block = self._blocks[tenant] = TokenBlock()
        return block
