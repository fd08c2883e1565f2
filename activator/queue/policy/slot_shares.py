"""Reserve slots of a version for its owner, so that guests do not hold all of them. Pure.

A slot is held for a whole answer. With a fair queue alone, an owner far below its share would still have to wait for a
guest's answer to end. So the owner has slots reserved: as many as it needed at once recently, but at most its share by
weight. If a version has at least MANY slots, one stays reserved while the owner pauses, since that costs guests little.

All other slots are open to everyone, and the fair queue decides between guests.
"""

from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 10.0  # the owner's demand is remembered for one to two windows
MANY_SLOTS: Final = 16  # with so many slots of a version, one stays reserved while its owner pauses
PAUSE_S: Final = 60.0  # how long that one is reserved, from the end of the window in which the owner needed a slot


@dataclass(slots=True)
class SlotShares:
    """Slot shares of one version. Times are seconds of one clock."""

    owner: str
    owner_running: int = 0  # slots that the owner has; the slot allocator counts them
    ends_s: float = 0.0  # when this window ends
    _weight: int = 1  # of the owner
    _peak: int = 0  # most requests of the owner at once in this window, queued ones included
    _peak_before: int = 0  # `_peak` of the previous window
    _paused_s: float = float("-inf")  # when the last window ended in which the owner needed a slot

    def record_request(self, tenant: str, weight: int, waiting: int) -> bool:
        """Record a new request of the tenant, which has `waiting` others in the queue. Return whether shares have
        changed, so that queued requests may get slots.
        """
        if tenant != self.owner:
            return False
        self._peak = max(self._peak, self.owner_running + waiting + 1)
        changed = weight != self._weight
        self._weight = weight
        return changed

    def refresh(self, now_s: float, waiting: int) -> None:
        """Begin a new window if it is time. The owner has `waiting` requests in the queue."""
        if now_s < self.ends_s:
            return
        if self._peak:
            self._paused_s = self.ends_s
        self._peak_before = self._peak if now_s < self.ends_s + WINDOW_S else 0
        self._peak = self.owner_running + waiting
        self.ends_s = now_s + WINDOW_S

    def refresh_in_s(self, now_s: float) -> float:
        """Return the seconds until `refresh` begins a new window."""
        return max(0.0, self.ends_s - now_s)

    def may_take(self, tenant: str, weight: int, slots: int, free: int, running: int) -> bool:
        """Return whether the tenant of that weight may have one of the `free` slots, of `slots` in all. `running` is
        how many slots are taken, the owner's included.
        """
        if free <= 0 or tenant == self.owner:
            return free > 0
        reserved = self._reserved(weight, slots)
        # The two conditions differ if a replica drains (only its running requests count) or is on trial (all its slots
        # count, and only one is free). A guest may have a slot if either one holds.
        return running - self.owner_running < slots - reserved or free > reserved - self.owner_running

    def check_integrity(self) -> None:
        """Assert that counts and peaks are consistent."""
        assert self.owner_running >= 0
        assert max(self._peak, self._peak_before) >= self.owner_running

    def _reserved(self, guest_weight: int, slots: int) -> int:
        """Return how many slots a guest of that weight leaves to the owner, including those that the owner has."""
        peak = max(self._peak, self._peak_before)
        if not peak and slots >= MANY_SLOTS and self.ends_s < self._paused_s + PAUSE_S + WINDOW_S:
            peak = 1
        share = max(1, slots * self._weight // (self._weight + guest_weight))
        return min(peak, share, slots - 1)
