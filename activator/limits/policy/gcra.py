"""A tenant's limit per minute: a bucket that fills at that rate and holds one minute's worth. Pure state.

The use of a request is known at its end. So the request holds its estimate first, and at its end it is charged for its
actual use. The charge fits in the bucket unless the estimate was too low. In any period, the sum of charges is at most
what flows in, plus one minute's worth.
"""

from dataclasses import dataclass
from math import floor
from typing import Final

from kelvin.contracts.token_bucket import ROUNDING, TokenBucket

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RateStatus:
    """The state of one of a tenant's limits per minute."""

    limit: int
    remaining: int
    reset_s: float  # until the bucket is full, without further or running requests
    wait_s: float | None = None  # if refused: seconds until a retry may succeed


@dataclass(slots=True)
class Bucket(TokenBucket):
    """One limit of one tenant. Times are seconds of one monotonic clock. The limit may change at any time."""

    held: int = 0  # held by running requests

    def free_units(self, limit: int, now_s: float) -> float:
        """Return the free units; negative if charges exceeded what was held."""
        return limit - self.missing(MINUTE_S / limit, now_s) - self.held

    def rate_status(self, limit: int, now_s: float, wait_s: float | None = None) -> RateStatus:
        """Return the current state of the limit."""
        remaining = max(0, floor(self.free_units(limit, now_s) + ROUNDING))
        return RateStatus(limit, remaining, max(0.0, self.full_at_s - now_s), wait_s)

    def hold(self, limit: int, units: int, now_s: float, needed: int | None = None) -> RateStatus:
        """Hold `units` for a request if there is room for `needed` of them (None: all). After success call `settle`."""
        needed = self.held + (units if needed is None else needed)
        wait_s = self.wait_s(needed, limit, MINUTE_S / limit, now_s)
        if wait_s:
            return self.rate_status(limit, now_s, min(MINUTE_S, wait_s))
        self.held += units
        return self.rate_status(limit, now_s)

    def settle(self, limit: int, held: int, used: int, now_s: float) -> None:
        """Charge a request that held `held` units and used `used`."""
        assert 0 <= held <= self.held
        self.held -= held
        if used:
            self.take(used, MINUTE_S / limit, now_s)

    def is_full(self, now_s: float) -> bool:
        """Return whether the bucket is full and not in use, so that a new one would equal it."""
        return not self.held and self.full_at_s <= now_s


class Buckets:
    """The buckets of one kind of limit for all tenants. Full buckets are dropped from time to time."""

    def __init__(self, min_sweep_size: int = 1024) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._sweep_at = self._least = min_sweep_size

    def __repr__(self) -> str:
        held = sum(bucket.held for bucket in self._buckets.values())
        return f"<Buckets tenants={len(self._buckets)} held={held}>"

    def ensure_bucket(self, tenant: str, now_s: float) -> Bucket:
        """Return the tenant's bucket. A new one is full."""
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= self._sweep_at:
                self._buckets = {name: each for name, each in self._buckets.items() if not each.is_full(now_s)}
                self._sweep_at = max(self._least, 2 * len(self._buckets))
            bucket = self._buckets[tenant] = Bucket()
        return bucket

    def check_integrity(self) -> None:
        """Assert that no bucket holds a negative amount, and that their number is bounded."""
        assert all(bucket.held >= 0 for bucket in self._buckets.values())
        assert len(self._buckets) <= self._sweep_at


def duration(seconds: float) -> str:
    """Format seconds as OpenAI's reset headers do, in Go's form: `17ms`, `1.5s`, `6m0s`."""
    milliseconds = max(0, round(seconds * 1000))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    return text if not minutes else f"{minutes}m{text}"
