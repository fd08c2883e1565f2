"""Requests and tokens per minute of each tenant: admission, rate-limit headers, and the final charge. A `RateCounter`
does the counting, in this process or in a store that several activators share.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from activator.limits.policy.gcra import Buckets, RateStatus, duration
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import TenantLimits
from kelvin.contracts.traffic_errors import RateLimited, TooLargeForRate

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"

Headers = list[tuple[bytes, bytes]]


class RateCounter(Protocol):
    """Counts one kind of limit for all tenants. `limit` is per minute."""

    async def hold(self, tenant: str, limit: int, units: int) -> RateStatus:
        """Hold `units`, unless the returned status says how long to wait. Safe to cancel: then nothing is held."""
        ...

    def settle(self, tenant: str, limit: int, held: int, used: int) -> None:
        """Charge `used` in place of `held`. Call it once for each granted `hold`."""
        ...

    def rate_status(self, tenant: str, limit: int) -> RateStatus:
        """Return the state that is known here. Never waits."""
        ...


class LocalRateCounter:
    """A `RateCounter` for a single activator."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets()
        self._clock = clock

    def __repr__(self) -> str:
        return f"<LocalRateCounter {self._buckets!r}>"

    async def hold(self, tenant: str, limit: int, units: int) -> RateStatus:
        """Hold `units` if there is room. Does not wait."""
        now_s = self._clock()
        return self._buckets.ensure_bucket(tenant, now_s).hold(limit, units, now_s)

    def settle(self, tenant: str, limit: int, held: int, used: int) -> None:
        """Charge `used` in place of `held`."""
        now_s = self._clock()
        self._buckets.ensure_bucket(tenant, now_s).settle(limit, held, used, now_s)

    def rate_status(self, tenant: str, limit: int) -> RateStatus:
        """Return the state of the tenant's bucket."""
        now_s = self._clock()
        return self._buckets.ensure_bucket(tenant, now_s).rate_status(limit, now_s)


class TokenReservation:
    """Tokens that a request holds until it is settled."""

    __slots__ = ("_held", "_limit", "_rate_counter", "_tenant")

    def __init__(self, rate_counter: RateCounter, tenant: str, limit: int, held: int) -> None:
        self._rate_counter = rate_counter
        self._tenant = tenant
        self._limit = limit
        self._held: int | None = held

    def settle(self, used: int) -> None:
        """Charge `used` tokens; 0 gives all back. A second call does nothing."""
        held, self._held = self._held, None
        if held is not None:
            self._rate_counter.settle(self._tenant, self._limit, held, used)


class RateLimits:
    """Request and token rates of all tenants that have such limits."""

    def __init__(self, requests: RateCounter | None = None, tokens: RateCounter | None = None) -> None:
        self._requests = requests or LocalRateCounter()
        self._tokens = tokens or LocalRateCounter()

    def __repr__(self) -> str:
        return f"<RateLimits requests={self._requests!r} tokens={self._tokens!r}>"

    async def count_request(self, headers: Headers, tenant: str, tenant_limits: TenantLimits) -> None:
        """Count a request, and put its tenant's limits into `headers`. Raises Refused(RateLimited)."""
        if tenant_limits.tpm is not None:
            headers[:] = _rate_headers(TOKENS, self._tokens.rate_status(tenant, tenant_limits.tpm))
        if tenant_limits.rpm is None:
            return
        status = await self._requests.hold(tenant, tenant_limits.rpm, 1)
        headers += _rate_headers(REQUESTS, status)
        if status.wait_s is not None:
            raise Refused(RateLimited(REQUESTS, tenant_limits.rpm, status.wait_s))
        self._requests.settle(tenant, tenant_limits.rpm, 1, 1)

    async def reserve(self, headers: Headers, tenant: str, limit: int, tokens: int) -> TokenReservation:
        """Hold the tokens that a request may use, and update `headers`. Raises Refused(RateLimited |
        TooLargeForRate). Waiting does not help against the latter.
        """
        if tokens > limit:
            raise Refused(TooLargeForRate(tokens, limit))
        status = await self._tokens.hold(tenant, limit, tokens)
        others = [line for line in headers if not line[0].endswith(b"-tokens")]
        headers[:] = _rate_headers(TOKENS, status) + others
        if status.wait_s is not None:
            raise Refused(RateLimited(TOKENS, limit, status.wait_s))
        return TokenReservation(self._tokens, tenant, limit, tokens)


def _rate_headers(kind: str, rate_status: RateStatus) -> Headers:
    """Return OpenAI's headers of this kind: x-ratelimit-limit-requests, x-ratelimit-remaining-requests,
    x-ratelimit-reset-requests, and the same for tokens.
    """
    facts = (
        ("limit", rate_status.limit),
        ("remaining", rate_status.remaining),
        ("reset", duration(rate_status.reset_s)),
    )
    return [(f"x-ratelimit-{name}-{kind}".encode(), str(value).encode()) for name, value in facts]
