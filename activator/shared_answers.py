"""`KeptAnswers` of several activators over one store: the same sealed bytes for all, one of them at work on a key.

While the store is away this process goes on by itself, for new keys; a claim that is not renewed ends by itself, so
that the death of an activator frees its keys within `LEASE_S`.
"""

import asyncio
import secrets
from typing import Final

from activator.asking import Keeps
from activator.kept_answers import Claim, Elsewhere, Mine, OwnAnswers
from activator.policy.once import ENTRY_BYTES, Asked, Kept, OnceLimits
from activator.shared_rates import Away, Full

LEASE_S: Final = 10.0
RENEW_S: Final = 3.0
RETRY_S: Final = 2.0  # what who finds a key in use elsewhere is told

# Out: 1 where it is ours now, else what it is for and, of an answer that is kept, that one.
CLAIM: Final = """
local there = redis.call('HMGET', KEYS[1], 'asked', 'sealed')
if not there[1] then
  redis.call('DEL', KEYS[1]) -- takes no memory, so that a full Redis goes on
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'asked', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return {1}
end
return {0, there[1], there[2] or ''}
"""
RENEW: Final = """
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
"""
RELEASE: Final = """
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
# A tenant's answers in the order of their ends, and their sizes with the sum under ''. The first to end makes room. A
# Redis that evicts may have dropped one of the two lists: then both begin anew, and the answers end by themselves.
KEEP: Final = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- finer than a millisecond: within one, too, the first makes room
if redis.call('EXISTS', KEYS[2]) ~= redis.call('EXISTS', KEYS[3]) then redis.call('DEL', KEYS[2], KEYS[3]) end
local function drop(name)
  redis.call('ZREM', KEYS[2], name)
  local size = redis.call('HGET', KEYS[3], name)
  if not size then return end
  redis.call('HINCRBY', KEYS[3], '', '-' .. size)
  redis.call('HDEL', KEYS[3], name)
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do drop(name) end
drop(ARGV[5])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'asked', ARGV[2], 'sealed', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[2], now + ARGV[4] * 1000, ARGV[5])
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
redis.call('HINCRBY', KEYS[3], '', ARGV[6])
local kept = redis.call('ZCARD', KEYS[2])
for _, oldest in ipairs(redis.call('ZRANGE', KEYS[2], 0, -2)) do -- all but the newest, which fits by itself
  if kept <= tonumber(ARGV[7]) and tonumber(redis.call('HGET', KEYS[3], '')) <= tonumber(ARGV[8]) then break end
  drop(oldest)
  redis.call('DEL', ARGV[9] .. oldest)
  kept = kept - 1
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return 1
"""
PUBLISH: Final = (
    """
local token = redis.call('HGET', KEYS[1], 'token')
if redis.call('EXISTS', KEYS[1]) == 1 and token ~= ARGV[1] then return 0 end
"""
    + KEEP
)


class SharedAnswers:
    """Used on one event loop. `own` is what this process keeps while the store is away."""

    def __init__(self, store: Keeps, own: OwnAnswers, limits: OnceLimits, lease_s: float = LEASE_S) -> None:
        self._store = store
        self._own = own
        self._limits = limits
        self._lease_ms = int(lease_s * 1000)
        self._claims: dict[bytes, str] = {}  # entry by token

    def __repr__(self) -> str:
        return f"<SharedAnswers claims={len(self._claims)} {self._own!r}>"

    async def claim(self, asked: Asked) -> Claim:
        """See `KeptAnswers`."""
        kept = await self._own.claim(asked)
        if isinstance(kept, Kept):
            return kept
        if not self._store.is_up:  # nobody waits for what is known to be away
            return Mine(is_alone=True)
        token, entry = secrets.token_bytes(16), _entry(asked)
        try:
            is_mine, *there = await self._store.ask(CLAIM, (entry,), token, asked.fingerprint, self._lease_ms)
        except Away:
            return Mine(is_alone=True)
        if is_mine:
            self._claims[token] = entry
            return Mine(token)
        fingerprint, sealed = there
        return Kept(fingerprint, sealed) if sealed else Elsewhere(fingerprint, RETRY_S)

    async def publish(self, asked: Asked, mine: Mine, sealed: bytes) -> None:
        """See `KeptAnswers`. Kept here where it can't be told."""
        self._claims.pop(mine.token, None)
        size, limits = len(sealed) + ENTRY_BYTES, self._limits
        if mine.is_alone:
            await self._own.publish(asked, mine, sealed)
        elif size > limits.tenant_bytes:
            await self.release(asked, mine)
        else:
            of_tenant = f"kelvin:{{{asked.tenant}}}:once"
            try:
                await self._store.keep(
                    PUBLISH, (_entry(asked), f"{of_tenant}-ends", f"{of_tenant}-sizes"), size, mine.token,
                    asked.fingerprint, sealed, int(limits.ttl_s * 1000), asked.name.hex(), size,
                    limits.tenant_answers, limits.tenant_bytes, f"{of_tenant}:",
                )  # fmt: skip
            except Full:
                await self._own.publish(asked, mine, sealed)
                await self.release(asked, mine)  # others run the request, rather than wait for an answer kept here
            except Away:
                await self._own.publish(asked, mine, sealed)

    async def release(self, asked: Asked, mine: Mine) -> None:
        """See `KeptAnswers`."""
        self._claims.pop(mine.token, None)
        if not mine.is_alone:
            try:
                await self._store.ask(RELEASE, (_entry(asked),), mine.token)
            except Away:
                return  # it ends by itself

    async def run(self) -> None:
        """Renew what is claimed, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Once; what can't be renewed ends soon, and what was lost is another's."""
        for token, entry in list(self._claims.items()):
            try:
                await self._store.ask(RENEW, (entry,), token, self._lease_ms)
            except Away:
                return


def _entry(asked: Asked) -> str:
    return f"kelvin:{{{asked.tenant}}}:once:{asked.name.hex()}"
