"""A tenant's limit per minute as one of several activators has it: a block out of the bucket they share. Pure state.

A block is taken out of the bucket before it is used, so all together never use more than was in it. What is left of it
goes back when more is asked for, or its time is over; where more was used than had been held, that is owed. Without the
bucket a block is good until its time is over; from then on there is the limit over the members, beginning with a
block's worth. Asking for another block is others' work, and they say when none will be had for a while.
"""

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from activator.limits.policy.gcra import MINUTE_S, Bucket, RateStatus

LEASE_S: Final = 2.0
BLOCKS: Final = 20  # in a minute's worth
QUIET_S: Final = 1.0  # between two questions while there is little to be had


def block_of(limit: int) -> int:
    """How much is taken at once, beside what is needed at once."""
    return max(1, limit // BLOCKS)


@dataclass(frozen=True, slots=True)
class RefillRequest:
    """What the bucket is asked: `give` goes back to it (below 0: is owed), then at least `need`, at most `want`."""

    give: int
    need: int
    want: int
    sent_s: float
    local_bucket: Bucket | None  # what was used without it, as far as it is owed
    owed: int  # of `give`, for that


@dataclass(slots=True)
class TokenBlock:
    """One tenant's. Times are seconds of this process's clock."""

    stock: int = 0  # out of the bucket and not charged yet; below 0: owed to it
    held: int = 0  # by requests under way
    ends_s: float = -inf
    quiet_until_s: float = -inf
    quiet_need: int = 0  # who needs less may ask all the same
    full_at_s: float = 0.0  # the bucket, as was last told
    local_bucket: Bucket | None = None  # while there is no bucket
    local_limit: int = 1  # its own, which was this activator's share when it began
    began_full_at_s: float = 0.0  # when it would have been full without any use

    def try_hold(self, units: int, now_s: float) -> bool:
        """Hold so many of the block; False where it has not as many, or its time is over."""
        if now_s >= self.ends_s or units > self.stock - self.held:
            return False
        self.held += units
        return True

    def settle(self, held: int, used: int, now_s: float) -> None:
        """A request that held so many used so many."""
        assert 0 <= held <= self.held
        self.held -= held
        if self.local_bucket is None:
            self.stock -= used
        else:
            self.local_bucket.settle(self.local_limit, 0, used, now_s)

    def refill_pause_s(self, units: int, now_s: float) -> float | None:
        """How long nobody should ask for so many; None where one may."""
        left_s = self.quiet_until_s - now_s
        return left_s if left_s > 0 and units >= self.quiet_need else None

    def ask(self, limit: int, need: int, waiting: int, now_s: float) -> RefillRequest:
        """What to ask the bucket for requests that wait for so many in all. Then `record_refill`, or
        `record_unanswered`, is owed.
        """
        left = self.stock - self.held
        self.stock -= left
        owed = self._owed(now_s)
        asked = RefillRequest(left - owed, need, max(need, waiting) + block_of(limit), now_s, self.local_bucket, owed)
        self.local_bucket = None
        return asked

    def give_back(self, limit: int, now_s: float, ahead_s: float = 0.0) -> RefillRequest | None:
        """What to tell the bucket of a block whose time is over within `ahead_s`, or of a debt; None where there is
        nothing to tell.
        """
        left = self.stock - self.held
        if self.local_bucket is None and (left == 0 or (left > 0 and now_s + ahead_s < self.ends_s)):
            return None
        asked = self.ask(limit, 0, 0, now_s)
        return RefillRequest(asked.give, 0, 0, now_s, asked.local_bucket, asked.owed)

    def record_refill(self, asked: RefillRequest, granted: int, full_in_s: float, now_s: float) -> None:
        """The bucket's answer; nothing is granted where less than what is needed was there."""
        self.full_at_s = now_s + full_in_s
        if not asked.want:
            return
        self.stock += granted
        self.ends_s = asked.sent_s + LEASE_S
        if granted < asked.want:
            self.quiet_until_s = now_s + QUIET_S
            self.quiet_need = 0 if granted else asked.need

    def record_unanswered(self, asked: RefillRequest) -> None:
        """No answer: nobody knows whether it was heard. What went back is given up, what is owed is still owed."""
        self.local_bucket = asked.local_bucket
        left = asked.give + asked.owed
        if left < 0:
            self.stock += left

    def hold_locally(self, share: int, units: int, now_s: float) -> RateStatus:
        """Hold so many of this activator's share of the limit, while there is no bucket.

        A request that is larger than the share enters once all of the share is there, and owes the rest. Otherwise it
        would be told to come back for ever.
        """
        if self.local_bucket is None:
            self.local_limit = share
            self.began_full_at_s = now_s + MINUTE_S * (1 - block_of(share) / share)
            self.local_bucket = Bucket(self.began_full_at_s)
        elif share != self.local_limit:
            self._change_alone(share, now_s)
        self.local_bucket.held = self.held
        found = self.local_bucket.hold(share, units, now_s, needed=min(units, share))
        if found.wait_s is None:
            self.held += units
        return found

    def _change_alone(self, share: int, now_s: float) -> None:
        """Take over a limit that was changed meanwhile: what was used of the old one counts in units."""
        assert self.local_bucket is not None
        times = self.local_limit / share
        self.local_bucket.full_at_s = now_s + max(0.0, self.local_bucket.full_at_s - now_s) * times
        self.began_full_at_s = now_s + max(0.0, self.began_full_at_s - now_s) * times
        self.local_limit = share

    def rate_status(self, limit: int, now_s: float, wait_s: float | None = None) -> RateStatus:
        """As it was last told, and what is left of the block."""
        reset_s = max(0.0, self.full_at_s - now_s)
        shared = limit - reset_s * limit / MINUTE_S
        own = self.stock - self.held if now_s < self.ends_s else 0
        return RateStatus(limit, max(0, min(limit, int(shared) + own)), reset_s, wait_s)

    def is_idle(self, now_s: float) -> bool:
        """Whether it tells no more than a new one would."""
        quiet = now_s >= max(self.ends_s, self.quiet_until_s, self.full_at_s)
        return quiet and not self.stock and not self.held and self.local_bucket is None

    def _owed(self, now_s: float) -> int:
        """What was used without the bucket, and has not flowed in since."""
        if self.local_bucket is None:
            return 0
        since_s = max(self.began_full_at_s, now_s)
        return ceil(max(0.0, self.local_bucket.full_at_s - since_s) * self.local_limit / MINUTE_S - 1e-6)
