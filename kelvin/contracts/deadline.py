"""A point in monotonic time after which an answer is worth nothing. Travels as remaining milliseconds per hop."""

import msgspec


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """`at_s` is on the monotonic clock of this process; never send it to another."""

    at_s: float

    @classmethod
    def after(cls, seconds: float, now: float) -> "Deadline":
        """The deadline `seconds` from `now` (monotonic seconds)."""
        return cls(now + seconds)

    def remaining_s(self, now: float) -> float:
        """Seconds left, never negative."""
        return self.at_s - now if self.at_s > now else 0.0

    def remaining_ms(self, now: float) -> int:
        """Whole milliseconds left, for the next hop."""
        return int(self.remaining_s(now) * 1000)

    def passed(self, now: float) -> bool:
        """Whether it is too late."""
        return now >= self.at_s
