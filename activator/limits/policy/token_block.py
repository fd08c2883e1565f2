"""A tenant's limit per minute for one of several activators: a block taken from their shared bucket. Pure state.

A block is taken from the bucket before it is used, so all activators together never use more than the bucket has. Its
rest goes back with the next query, or when the block expires. Use above what was held is owed to the bucket. Without
the bucket, a block can be used until it expires. After that the activator uses limit / members, beginning with one
block's worth. `redis_rate_counter.py` queries the bucket.
"""

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from activator.limits.policy.gcra import MINUTE_S, Bucket, RateStatus

LEASE_S: Final = 2.0
BLOCKS_PER_MINUTE: Final = 20  # blocks per minute's worth
QUIET_S: Final = 1.0  # interval between queries while little is available


def block_size(limit: int) -> int:
    """Return how many units are taken ahead of what is needed at once."""
    return max(1, limit // BLOCKS_PER_MINUTE)


@dataclass(frozen=True, slots=True)
class RefillRequest:
    """A query to the bucket: give back `give` (below 0: owed), then take at least `need`, at most `want`."""

    give: int
    need: int
    want: int
    sent_s: float
    local_bucket: Bucket | None  # the local bucket that the debt is from
    owed: int  # part of `give` that pays this debt


@dataclass(slots=True)
class TokenBlock:
    """One tenant's block. Times are seconds of this process's clock."""

    stock: int = 0  # taken from the bucket and not charged yet; below 0: owed to it
    held: int = 0  # held by running requests
    ends_s: float = -inf
    quiet_until_s: float = -inf
    quiet_need: int = 0  # smaller needs may still query
    full_at_s: float = 0.0  # when the shared bucket is full, as last reported
    local_bucket: Bucket | None = None  # in use while the shared bucket is away
    local_limit: int = 1  # limit of `local_bucket`: this activator's share
    began_full_at_s: float = 0.0  # when `local_bucket` would be full without use

    def try_hold(self, units: int, now_s: float) -> bool:
        """Hold `units` of the block. Return False if it has fewer or has expired."""
        if now_s >= self.ends_s or units > self.stock - self.held:
            return False
        self.held += units
        return True

    def settle(self, held: int, used: int, now_s: float) -> None:
        """Charge a request that held `held` units and used `used`."""
        assert 0 <= held <= self.held
        self.held -= held
        if self.local_bucket is None:
            self.stock -= used
        else:
            self.local_bucket.settle(self.local_limit, 0, used, now_s)

    def refill_pause_s(self, units: int, now_s: float) -> float | None:
        """Return the seconds during which not to query for `units`, or None if a query is allowed."""
        left_s = self.quiet_until_s - now_s
        return left_s if left_s > 0 and units >= self.quiet_need else None

    def build_refill_request(self, limit: int, need: int, waiting: int, now_s: float) -> RefillRequest:
        """Return the query for `waiting` waiting units. Call `record_refill` or `record_unanswered` afterwards."""
        left = self.stock - self.held
        self.stock -= left
        owed = self._owed(now_s)
        refill_request = RefillRequest(
            left - owed, need, max(need, waiting) + block_size(limit), now_s, self.local_bucket, owed
        )
        self.local_bucket = None
        return refill_request

    def build_return_request(self, limit: int, now_s: float, ahead_s: float = 0.0) -> RefillRequest | None:
        """Return the query for a block that expires within `ahead_s`, or for a debt. None if there is neither."""
        left = self.stock - self.held
        if self.local_bucket is None and (left == 0 or (left > 0 and now_s + ahead_s < self.ends_s)):
            return None
        refill_request = self.build_refill_request(limit, 0, 0, now_s)
        return RefillRequest(refill_request.give, 0, 0, now_s, refill_request.local_bucket, refill_request.owed)

    def record_refill(self, refill_request: RefillRequest, granted: int, full_in_s: float, now_s: float) -> None:
        """Record the bucket's answer. It grants nothing if it has less than is needed."""
        self.full_at_s = now_s + full_in_s
        if not refill_request.want:
            return
        self.stock += granted
        self.ends_s = refill_request.sent_s + LEASE_S
        if granted < refill_request.want:
            self.quiet_until_s = now_s + QUIET_S
            self.quiet_need = 0 if granted else refill_request.need

    def record_unanswered(self, refill_request: RefillRequest) -> None:
        """Handle a query without an answer, which may have been executed. Returned units are lost, debts remain."""
        self.local_bucket = refill_request.local_bucket
        left = refill_request.give + refill_request.owed
        if left < 0:
            self.stock += left

    def hold_locally(self, share: int, units: int, now_s: float) -> RateStatus:
        """Hold `units` of this activator's share of the limit, while the bucket is away. A request larger than the
        share enters once the whole share is free, and owes the rest. Otherwise it would be refused for ever.
        """
        if self.local_bucket is None:
            self.local_limit = share
            self.began_full_at_s = now_s + MINUTE_S * (1 - block_size(share) / share)
            self.local_bucket = Bucket(self.began_full_at_s)
        elif share != self.local_limit:
            self._change_local_limit(share, now_s)
        self.local_bucket.held = self.held
        status = self.local_bucket.hold(share, units, now_s, needed=min(units, share))
        if status.wait_s is None:
            self.held += units
        return status

    def _change_local_limit(self, share: int, now_s: float) -> None:
        """Apply a changed limit. Use under the old limit still counts in units."""
        assert self.local_bucket is not None
        ratio = self.local_limit / share
        self.local_bucket.full_at_s = now_s + max(0.0, self.local_bucket.full_at_s - now_s) * ratio
        self.began_full_at_s = now_s + max(0.0, self.began_full_at_s - now_s) * ratio
        self.local_limit = share

    def rate_status(self, limit: int, now_s: float, wait_s: float | None = None) -> RateStatus:
        """Return the limit's state: as last reported by the bucket, plus what is left of the block."""
        reset_s = max(0.0, self.full_at_s - now_s)
        shared = limit - reset_s * limit / MINUTE_S
        own = self.stock - self.held if now_s < self.ends_s else 0
        return RateStatus(limit, max(0, min(limit, int(shared) + own)), reset_s, wait_s)

    def is_idle(self, now_s: float) -> bool:
        """Return whether a new block would equal this one."""
        quiet = now_s >= max(self.ends_s, self.quiet_until_s, self.full_at_s)
        return quiet and not self.stock and not self.held and self.local_bucket is None

    def _owed(self, now_s: float) -> int:
        """Return what was used without the bucket and has not flowed in since."""
        if self.local_bucket is None:
            return 0
        since_s = max(self.began_full_at_s, now_s)
        return ceil(max(0.0, self.local_bucket.full_at_s - since_s) * self.local_limit / MINUTE_S - 1e-6)
