"""What a tenant may use in a minute, as a bucket that fills at that rate and holds a minute's worth. Pure state.

What a request will have used is known at its end, so it holds its estimate first, and is charged what it was then: what
is charged never was more than room for it, but where an estimate was too low. In any span of time so much is charged as
flows in meanwhile, and a minute's worth at most beyond it.
"""

from dataclasses import dataclass
from math import floor
from typing import Final

from kelvin.contracts.token_bucket import ROUNDING, TokenBucket

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RateStatus:
    """Where a tenant stands with one of its limits per minute."""

    limit: int
    remaining: int
    reset_s: float  # until all of it is there again, if nothing more is asked and nothing is under way
    wait_s: float | None = None  # what was asked for is refused; it may be had then, if nobody else asks


@dataclass(slots=True)
class Bucket(TokenBucket):
    """One limit of one tenant. Times are seconds of one clock that never steps back; a limit may change at any time."""

    held: int = 0  # by requests under way

    def room(self, limit: int, now_s: float) -> float:
        """Return the units that are free; negative if more was charged than had been held."""
        return limit - self.missing(MINUTE_S / limit, now_s) - self.held

    def rate_status(self, limit: int, now_s: float, wait_s: float | None = None) -> RateStatus:
        """Return where the tenant stands now."""
        remaining = max(0, floor(self.room(limit, now_s) + ROUNDING))
        return RateStatus(limit, remaining, max(0.0, self.full_at_s - now_s), wait_s)

    def hold(self, limit: int, units: int, now_s: float, needed: int | None = None) -> RateStatus:
        """Hold `units` for a request if there is room for `needed` of them (None: for all). After success call
        `settle`.
        """
        needed = self.held + (units if needed is None else needed)
        wait_s = self.wait_s(needed, limit, MINUTE_S / limit, now_s)
        if wait_s:
            return self.rate_status(limit, now_s, min(MINUTE_S, wait_s))
        self.held += units
        return self.rate_status(limit, now_s)

    def settle(self, limit: int, held: int, used: int, now_s: float) -> None:
        """A request that held so many used so many."""
        assert 0 <= held <= self.held
        self.held -= held
        if used:
            self.take(used, MINUTE_S / limit, now_s)

    def is_full(self, now_s: float) -> bool:
        """Whether it tells no more than a new one would."""
        return not self.held and self.full_at_s <= now_s


class Buckets:
    """One kind of limit, of all tenants; of those that ask for nothing, none is kept for long."""

    def __init__(self, least: int = 1024) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._sweep_at = self._least = least

    def __repr__(self) -> str:
        held = sum(bucket.held for bucket in self._buckets.values())
        return f"<Buckets tenants={len(self._buckets)} held={held}>"

    def of(self, tenant: str, now_s: float) -> Bucket:
        """The tenant's, which is full where it was not known."""
        found = self._buckets.get(tenant)
        if found is None:
            if len(self._buckets) >= self._sweep_at:
                self._buckets = {name: each for name, each in self._buckets.items() if not each.is_full(now_s)}
                self._sweep_at = max(self._least, 2 * len(self._buckets))
            found = self._buckets[tenant] = Bucket()
        return found

    def check_integrity(self) -> None:
        """Nothing that is held is less than nothing, and what is kept is bounded."""
        assert all(bucket.held >= 0 for bucket in self._buckets.values())
        assert len(self._buckets) <= self._sweep_at


def duration(seconds: float) -> str:
    """As OpenAI tells resets, which is Go's form: `17ms`, `1.5s`, `6m0s`."""
    milliseconds = max(0, round(seconds * 1000))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    return text if not minutes else f"{minutes}m{text}"
