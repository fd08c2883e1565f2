"""Requests and tokens per minute of each tenant: what may enter, what callers are told of it, what it took in the end.

Where the count is kept is `Counting`'s matter: in this process, or in one that several activators share.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from activator.policy.gcra import Buckets, Standing, duration
from contracts.control import TenantLimits
from contracts.errors import Refused
from contracts.traffic_errors import RateLimited, TooLargeForRate

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"

Headers = list[tuple[bytes, bytes]]


class Counting(Protocol):
    """One kind of limit, of all tenants. `limit` is a minute's."""

    async def hold(self, tenant: str, limit: int, units: int) -> Standing:
        """Hold so many, unless the standing that is returned says how long to wait. Cancelling leaves nothing held."""
        ...

    def settle(self, tenant: str, limit: int, held: int, used: int) -> None:
        """What was held took so much. Owed once for each `hold` that was granted."""
        ...

    def standing(self, tenant: str, limit: int) -> Standing:
        """As it is known here. Never waits."""
        ...


class InProcess:
    """`Counting` of one activator."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets()
        self._clock = clock

    def __repr__(self) -> str:
        return f"<InProcess {self._buckets!r}>"

    async def hold(self, tenant: str, limit: int, units: int) -> Standing:
        """See `Counting`; returns at once."""
        now_s = self._clock()
        return self._buckets.of(tenant, now_s).hold(limit, units, now_s)

    def settle(self, tenant: str, limit: int, held: int, used: int) -> None:
        """See `Counting`."""
        now_s = self._clock()
        self._buckets.of(tenant, now_s).settle(limit, held, used, now_s)

    def standing(self, tenant: str, limit: int) -> Standing:
        """See `Counting`."""
        now_s = self._clock()
        return self._buckets.of(tenant, now_s).standing(limit, now_s)


class Reservation:
    """Tokens that a request holds until it is settled, which happens once."""

    __slots__ = ("_counting", "_held", "_limit", "_tenant")

    def __init__(self, counting: Counting, tenant: str, limit: int, held: int) -> None:
        self._counting = counting
        self._tenant = tenant
        self._limit = limit
        self._held: int | None = held

    def settle(self, used: int) -> None:
        """So many it was; 0 gives all of them back. A second call does nothing."""
        held, self._held = self._held, None
        if held is not None:
            self._counting.settle(self._tenant, self._limit, held, used)


class Rates:
    """Of all tenants that have such limits."""

    def __init__(self, requests: Counting | None = None, tokens: Counting | None = None) -> None:
        self._requests = requests or InProcess()
        self._tokens = tokens or InProcess()

    def __repr__(self) -> str:
        return f"<Rates requests={self._requests!r} tokens={self._tokens!r}>"

    async def enter(self, told: Headers, tenant: str, own: TenantLimits) -> None:
        """Count a request. `told`, headers of its answer, say where its tenant stands. Raises Refused(RateLimited)."""
        if own.tpm is not None:
            told[:] = _told(TOKENS, self._tokens.standing(tenant, own.tpm))
        if own.rpm is None:
            return
        found = await self._requests.hold(tenant, own.rpm, 1)
        told += _told(REQUESTS, found)
        if found.wait_s is not None:
            raise Refused(RateLimited(REQUESTS, own.rpm, found.wait_s))
        self._requests.settle(tenant, own.rpm, 1, 1)

    async def reserve(self, told: Headers, tenant: str, limit: int, tokens: int) -> Reservation:
        """Hold the tokens that a request may take; `told` as in `enter`. Raises Refused: RateLimited; TooLargeForRate,
        for which no waiting helps.
        """
        if tokens > limit:
            raise Refused(TooLargeForRate(tokens, limit))
        found = await self._tokens.hold(tenant, limit, tokens)
        others = [line for line in told if not line[0].endswith(b"-tokens")]
        told[:] = _told(TOKENS, found) + others
        if found.wait_s is not None:
            raise Refused(RateLimited(TOKENS, limit, found.wait_s))
        return Reservation(self._tokens, tenant, limit, tokens)


def _told(kind: str, standing: Standing) -> Headers:
    """OpenAI's three headers."""
    facts = (("limit", standing.limit), ("remaining", standing.remaining), ("reset", duration(standing.reset_s)))
    return [(f"x-ratelimit-{name}-{kind}".encode(), str(value).encode()) for name, value in facts]
