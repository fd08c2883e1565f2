"""A point in monotonic time after which a response is useless. Each hop receives the remaining milliseconds."""

import msgspec


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """A deadline. `at_s` is on the monotonic clock of this process; never send it to another."""

    at_s: float

    @classmethod
    def after(cls, seconds: float, now: float) -> "Deadline":
        """Return the deadline `seconds` after `now` (monotonic seconds)."""
        return cls(now + seconds)

    def remaining_s(self, now: float) -> float:
        """Return the seconds left, never negative."""
        return self.at_s - now if self.at_s > now else 0.0

    def remaining_ms(self, now: float) -> int:
        """Return the whole milliseconds left, for the next hop."""
        return int(self.remaining_s(now) * 1000)

    def has_passed(self, now: float) -> bool:
        """Return whether the deadline has passed."""
        return now >= self.at_s
