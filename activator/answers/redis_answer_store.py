"""The answer store of several activators: one Redis holds the sealed answers, and one activator at a time runs a key. A
claim that is not renewed expires, so keys of a dead activator are free within `LEASE_S`.
"""

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from activator.answers.answer_store import Claimed, ClaimedElsewhere, ClaimResult, LocalAnswerStore
from activator.answers.idempotency_policy import ENTRY_BYTES, AnswerKey, AnswerStoreLimits, KeptAnswer
from activator.limits.single_flight import MAX_CONCURRENT_QUERIES
from activator.limits.store_errors import StoreFull, StoreUnavailable

if TYPE_CHECKING:  # the library is imported only if Redis is used
    from activator.limits.redis_store import RedisStore

LEASE_S: Final = 10.0
RETRY_S: Final = 2.0  # Retry-After for a key that another activator runs

# Claim a name, or only look it up. Input: the claim's token, or '' to look up; the fingerprint; the claim's
# milliseconds. Output: the fingerprint found, or nil if there was none; the answer, or nil for a claim; milliseconds to
# its expiry.
CLAIM: Final = """
local there = redis.call('HMGET', KEYS[1], 'asked', 'sealed')
if there[1] then return {there[1], there[2], redis.call('PTTL', KEYS[1])} end
if ARGV[1] ~= '' then
  redis.call('DEL', KEYS[1]) -- needs no memory, so a full Redis runs it
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'asked', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return {false, false, 0}
"""
# Renew a claim, and set it again if Redis has lost its data. Input as in CLAIM.
RENEW: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[1]) -- as in a claim
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'asked', ARGV[2])
end
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 0
"""
RELEASE: Final = """
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
# KEYS[2] orders a tenant's answers by expiry; KEYS[3] has their sizes, with the sum under ''. The first to expire makes
# room. Four special cases:
# (1) Without a token, the existing entry is replaced.
# (2) A Redis that evicts may have dropped one of the two keys. Then both start empty, and the answers expire by TTL.
# (3) An answer that expires after the new one was kept before Redis's clock stepped back. It makes room first.
# (4) Redis may have evicted a listed answer whose key was claimed since then. That claim stays.
PUBLISH: Final = """
-- (1)
if ARGV[1] ~= '' and redis.call('EXISTS', KEYS[1]) == 1 and redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then
  return 0
end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2] -- microseconds: keep the order within a millisecond
-- (2)
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
local ends = now + ARGV[4] * 1000
-- (3)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], string.format('%.0f', ends), '+inf')) do
  redis.call('ZADD', KEYS[2], ends - 1, name)
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'asked', ARGV[2], 'sealed', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[2], ends, ARGV[5])
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
redis.call('HINCRBY', KEYS[3], '', ARGV[6])
local kept = redis.call('ZCARD', KEYS[2])
for _, oldest in ipairs(redis.call('ZRANGE', KEYS[2], 0, -2)) do -- all but the newest, which fits by itself
  if kept <= tonumber(ARGV[7]) and tonumber(redis.call('HGET', KEYS[3], '')) <= tonumber(ARGV[8]) then break end
  drop(oldest)
  -- (4)
  if redis.call('HEXISTS', ARGV[9] .. oldest, 'token') == 0 then redis.call('DEL', ARGV[9] .. oldest) end
  kept = kept - 1
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return 1
"""


class RedisAnswerStore:
    """An `AnswerStore` in Redis for one `kind` of answers. Use from one event loop. While Redis is away, each activator
    claims names for itself. `fallback` keeps answers while Redis is away or full; without it they are lost then.
    """

    def __init__(
        self,
        store: "RedisStore",
        kind: str,
        limits: AnswerStoreLimits,
        fallback: LocalAnswerStore | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._kind = kind
        self._limits = limits
        self._fallback = fallback
        self._lease_ms = int(lease_s * 1000)
        self._claims: dict[bytes, AnswerKey] = {}  # by token

    def __repr__(self) -> str:
        return f"<RedisAnswerStore {self._kind} claims={len(self._claims)} {self._fallback!r}>"

    @property
    def nbytes(self) -> int:
        """Return the bytes kept in `fallback`. Answers in Redis do not count."""
        return 0 if self._fallback is None else self._fallback.nbytes

    async def find(self, answer_key: AnswerKey) -> KeptAnswer | None:
        """Return the answer in `fallback` or in Redis, or None. Also None if Redis is away."""
        result = await self._find_or_claim(answer_key, b"")
        return result if isinstance(result, KeptAnswer) else None

    async def claim(self, answer_key: AnswerKey) -> ClaimResult:
        """Claim the name in Redis. If Redis is away, return a claim that `is_alone`."""
        token = secrets.token_bytes(16)
        result = await self._find_or_claim(answer_key, token)
        if isinstance(result, Claimed) and not result.is_alone:
            self._claims[token] = answer_key
        return result

    async def _find_or_claim(self, answer_key: AnswerKey, token: bytes) -> ClaimResult:
        """Return the entry of a name. If there is none, claim the name with `token`, unless that is empty."""
        if self._fallback is not None and (answer := await self._fallback.find(answer_key)) is not None:
            return answer
        if not self._store.is_up:  # do not wait for a Redis that is known to be away
            return Claimed(is_alone=True)
        try:
            fingerprint, sealed, left_ms = await self._store.run_script(
                CLAIM, (self._redis_key(answer_key),), token, answer_key.fingerprint, self._lease_ms
            )
        except StoreUnavailable:
            return Claimed(is_alone=True)
        if fingerprint is None:
            return Claimed(token)
        if sealed is None:
            return ClaimedElsewhere(fingerprint, RETRY_S)
        return KeptAnswer(fingerprint, sealed, max(0.0, self._limits.ttl_s - left_ms / 1000))

    async def publish(self, answer_key: AnswerKey, claim: Claimed | None, sealed: bytes) -> None:
        """Keep the answer in Redis and end the claim. If Redis is away or full, keep it in `fallback`."""
        if claim is not None:
            self._claims.pop(claim.token, None)
        try:
            await self._publish(answer_key, claim, sealed)
        except StoreUnavailable as away:
            if self._fallback is not None:
                await self._fallback.publish(answer_key, claim, sealed)
            if claim is not None and isinstance(away, StoreFull):
                # other activators run the request instead of waiting for an answer that only this one has
                await self.release(answer_key, claim)

    async def _publish(self, answer_key: AnswerKey, claim: Claimed | None, sealed: bytes) -> None:
        """Keep the answer in Redis. Raises StoreUnavailable, also if Redis was away when the name was claimed."""
        if not self._store.is_up if claim is None else claim.is_alone:
            raise StoreUnavailable
        size, limits = len(sealed) + ENTRY_BYTES, self._limits
        if size <= limits.tenant_bytes:
            prefix = self._tenant_prefix(answer_key)
            await self._store.run_storing_script(
                PUBLISH, (self._redis_key(answer_key), f"{prefix}-ends", f"{prefix}-sizes"), size,
                b"" if claim is None else claim.token, answer_key.fingerprint, sealed, int(limits.ttl_s * 1000),
                answer_key.name.hex(), size, limits.tenant_answers, limits.tenant_bytes, f"{prefix}:",
            )  # fmt: skip
        elif claim is not None:
            await self.release(answer_key, claim)

    async def release(self, answer_key: AnswerKey, claim: Claimed) -> None:
        """End the claim in Redis. If Redis is away, the claim expires."""
        self._claims.pop(claim.token, None)
        if not claim.is_alone:
            with suppress(StoreUnavailable):  # the claim expires
                await self._store.run_script(RELEASE, (self._redis_key(answer_key),), claim.token)

    async def maintain(self) -> None:
        """Renew this process's claims. A claim that can't be renewed soon expires. A claim that Redis has lost is set
        again, unless another activator has the name now.
        """
        if self._fallback is not None:
            await self._fallback.maintain()
        claims = list(self._claims.items())
        for first in range(0, len(claims), MAX_CONCURRENT_QUERIES):
            batch = claims[first : first + MAX_CONCURRENT_QUERIES]
            if not all(await asyncio.gather(*(self._renew(*claim) for claim in batch))):
                return

    async def _renew(self, token: bytes, answer_key: AnswerKey) -> bool:
        """Renew a claim. Return False if Redis is away."""
        try:
            if token in self._claims:  # it may have ended meanwhile
                await self._store.run_script(
                    RENEW, (self._redis_key(answer_key),), token, answer_key.fingerprint, self._lease_ms
                )
            if token not in self._claims:  # Redis may have received the release before the renewal
                await self._store.run_script(RELEASE, (self._redis_key(answer_key),), token)
        except StoreUnavailable:
            return False
        return True

    def _tenant_prefix(self, answer_key: AnswerKey) -> str:
        return f"kelvin:{{{answer_key.tenant}}}:{self._kind}"

    def _redis_key(self, answer_key: AnswerKey) -> str:
        return f"{self._tenant_prefix(answer_key)}:{answer_key.name.hex()}"
