"""Reserve slots of a version for the tenants that use it, so that no tenant holds all of them. Pure.

A slot is held for a whole answer. With a fair queue alone, a tenant far below its share would still have to wait for
another tenant's answer to end. So each tenant that used the version recently has slots reserved: as many as it needed
at once, but at most its share by weight. All other slots are open to everyone. If a version has MANY slots, one is also
reserved for an owner that pauses, since that costs guests little.

With more recent tenants than slots only the owner's slot is reserved, and the fair queue does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

WINDOW_S: Final = 10.0  # a tenant's need is remembered for one to two windows
MANY: Final = 16  # slots of a version from which on one is reserved for an absent owner


@dataclass(slots=True)
class _Use:
    """One tenant's use of a version."""

    weight: int
    running: int = 0
    peak: int = 0  # most requests at once in this window, queued ones included
    peak_before: int = 0  # in the window before
    reserved: int = 0  # free slots that are reserved for it; valid while `SlotShares` is counted

    @property
    def need(self) -> int:
        return max(self.peak, self.peak_before)


@dataclass(slots=True)
class SlotShares:
    """Slot shares of one version. Times are seconds of one clock."""

    owner: str
    _uses: dict[str, _Use] = field(default_factory=dict)  # tenants that used the version recently
    _weights: int = 0  # sum over `_uses`
    _since_s: float = 0.0  # when this window began
    # Sum of `reserved` over `_uses`. Counted incrementally: each free slot is offered to all waiting tenants.
    _reserved_all: int = 0
    _counted_slots: int = 0  # the version's slots when reservations were counted; 0: count them again
    is_owner_alone: bool = False  # nobody else used the version recently: nothing is reserved

    def ask(self, tenant: str, weight: int, waiting: int) -> bool:
        """Record a new request of the tenant, which has `waiting` others in the queue.

        Return whether shares have changed, so that queued requests may get slots.
        """
        use = self._uses.get(tenant)
        changed = use is None or use.weight != weight
        if use is None:
            use = self._uses[tenant] = _Use(weight)
            self._weights += weight
        elif changed:
            self._weights += weight - use.weight
            use.weight = weight
        if changed:
            self.is_owner_alone = len(self._uses) == 1 and tenant == self.owner
            self._counted_slots = 0
        needs = use.running + waiting + 1
        if needs > use.peak:
            use.peak = needs
            if self._counted_slots:
                self._count(use)
        return changed

    def take(self, tenant: str) -> None:
        """Record that the tenant got a slot, after `ask`."""
        use = self._uses[tenant]
        use.running += 1
        if self._counted_slots:
            self._count(use)

    def give_back(self, tenant: str, slots: int = 1) -> None:
        """Record that the tenant released slots."""
        use = self._uses[tenant]
        use.running -= slots
        if self._counted_slots:
            self._count(use)

    def refresh(self, now_s: float, waiting_of: Callable[[str], int]) -> None:
        """Begin a new window if it is time. `waiting_of` returns a tenant's queued requests."""
        if now_s < self._since_s + WINDOW_S:
            return
        self._since_s = now_s
        self._counted_slots = 0
        for tenant, use in list(self._uses.items()):
            use.peak_before, use.peak = use.peak, use.running + waiting_of(tenant)
            if not use.need:
                del self._uses[tenant]
                self._weights -= use.weight
        self.is_owner_alone = self._uses.keys() == {self.owner}

    def refresh_in_s(self, now_s: float) -> float:
        """Return the seconds until `refresh` begins a new window."""
        return max(0.0, self._since_s + WINDOW_S - now_s)

    def may_take(self, tenant: str, slots: int, free: int) -> bool:
        """Return whether the tenant may have one of the `free` slots, of `slots` in all. Call `ask` first."""
        if free <= 0:
            return False
        if self.is_owner_alone or free >= slots:
            return True
        own = self._uses[tenant]
        if self._tenants <= slots and own.running < self._share(own.weight, slots):
            return True
        return free > self._reserved_for_others(tenant, own, slots)

    def check_integrity(self) -> None:
        """Raise AssertionError if a sum or bound is wrong."""
        assert self._weights == sum(use.weight for use in self._uses.values())
        assert self.is_owner_alone == (self._uses.keys() == {self.owner})
        assert all(use.running >= 0 and use.need >= 1 for use in self._uses.values())
        if self._counted_slots:
            assert self._reserved_all == sum(use.reserved for use in self._uses.values())
            assert all(use.reserved == self._reserved_for(use) for use in self._uses.values())

    def running(self, tenant: str) -> int:
        """Return how many slots the tenant has."""
        use = self._uses.get(tenant)
        return 0 if use is None else use.running

    @property
    def _tenants(self) -> int:
        """Recent tenants. The owner always counts."""
        return len(self._uses) + (self.owner not in self._uses)

    def _share(self, weight: int, slots: int) -> int:
        """Return the share of a tenant of that weight: at least one slot, and one is left for each other tenant."""
        weights = self._weights + (self.owner not in self._uses)
        return max(1, min(slots * weight // weights, slots - self._tenants + 1))

    def _reserved_for_others(self, tenant: str, own: _Use, slots: int) -> int:
        """Return how many free slots are reserved for other tenants. `own` is the tenant's use."""
        reserved = 0
        if self._tenants <= slots:
            if self._counted_slots != slots:
                self._counted_slots, self._reserved_all = slots, 0
                for use in self._uses.values():
                    use.reserved = self._reserved_for(use)
                    self._reserved_all += use.reserved
            reserved = self._reserved_all - own.reserved
        if slots >= MANY and tenant != self.owner and self.owner not in self._uses:
            reserved += 1
        return reserved

    def _count(self, use: _Use) -> None:
        """Count again the slots that are reserved for a tenant, whose use has changed."""
        reserved = self._reserved_for(use)
        self._reserved_all += reserved - use.reserved
        use.reserved = reserved

    def _reserved_for(self, use: _Use) -> int:
        return max(0, min(use.need, self._share(use.weight, self._counted_slots)) - use.running)
