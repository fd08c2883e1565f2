"""Keep slots of a version free for tenants that use it, so that none holds all of them while others come. Pure.

A slot is held for a whole answer. A fair queue alone would let a tenant wait for the answer of another one, however
small its own share is. So each tenant that used the version lately is entitled to as many slots as it needed at once,
at most its share of all slots by weight. Slots that nobody is entitled to are anybody's. Where a version has many
slots, its owner is entitled to one also after a pause: that costs guests little.

With more tenants than slots nothing but that slot is kept, and the queue does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

WINDOW_S: Final = 10.0  # what a tenant needed is remembered for one to two of these
MANY: Final = 16  # slots, of which the owner's is kept while it is away


@dataclass(slots=True)
class _Use:
    """What one tenant uses of a version."""

    weight: int
    running: int = 0
    peak: int = 0  # requests at once in this window, waiting ones included
    peak_before: int = 0  # in the window before
    kept: int = 0  # free slots that are kept for it, as far as `SlotShares` has counted

    @property
    def need(self) -> int:
        return max(self.peak, self.peak_before)


@dataclass(slots=True)
class SlotShares:
    """Of one version. Times are seconds of one clock."""

    owner: str
    _uses: dict[str, _Use] = field(default_factory=dict)  # tenants that used it lately
    _weights: int = 0  # of them all
    _since_s: float = 0.0  # when this window began
    # Of all tenants; kept up to date, as many tenants may wait at each slot that comes free.
    _kept_all: int = 0
    _counted_slots: int = 0  # of the version, when that was counted; 0: count anew
    is_owner_alone: bool = False  # nobody else used it lately: no slot is kept for anybody

    def ask(self, tenant: str, weight: int, waiting: int) -> bool:
        """Note that the tenant has one more request, beside so many that wait. Return whether the shares have changed,
        so that somebody who waits may be let in.
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
        """The tenant has one more slot. It has asked."""
        use = self._uses[tenant]
        use.running += 1
        if self._counted_slots:
            self._count(use)

    def give_back(self, tenant: str, slots: int = 1) -> None:
        """The tenant has so many slots less."""
        use = self._uses[tenant]
        use.running -= slots
        if self._counted_slots:
            self._count(use)

    def refresh(self, now_s: float, waiting_of: Callable[[str], int]) -> None:
        """Forget what was needed long ago. `waiting_of`: requests of a tenant that wait."""
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
        """Return how long it takes until `refresh` has something to do."""
        return max(0.0, self._since_s + WINDOW_S - now_s)

    def may_take(self, tenant: str, slots: int, free: int) -> bool:
        """Return whether the tenant, which has asked, may have one of so many free slots, of `slots` in all."""
        if free <= 0:
            return False
        if self.is_owner_alone or free >= slots:
            return True
        own = self._uses[tenant]
        if self._tenants <= slots and own.running < self._share(own.weight, slots):
            return True
        return free > self._kept(tenant, own, slots)

    def check_integrity(self) -> None:
        """Raises AssertionError where sums or bounds are wrong."""
        assert self._weights == sum(use.weight for use in self._uses.values())
        assert self.is_owner_alone == (self._uses.keys() == {self.owner})
        assert all(use.running >= 0 and use.need >= 1 for use in self._uses.values())
        if self._counted_slots:
            assert self._kept_all == sum(use.kept for use in self._uses.values())
            assert all(use.kept == self._kept_for(use) for use in self._uses.values())

    def running(self, tenant: str) -> int:
        """Return how many slots the tenant has."""
        use = self._uses.get(tenant)
        return 0 if use is None else use.running

    @property
    def _tenants(self) -> int:
        """How many used it lately; the owner always counts."""
        return len(self._uses) + (self.owner not in self._uses)

    def _share(self, weight: int, slots: int) -> int:
        """Slots of a tenant of that weight: one at least, and one is left for each other tenant."""
        weights = self._weights + (self.owner not in self._uses)
        return max(1, min(slots * weight // weights, slots - self._tenants + 1))

    def _kept(self, tenant: str, own: _Use, slots: int) -> int:
        """Return how many free slots are kept for others than the tenant, whose use is `own`."""
        kept = 0
        if self._tenants <= slots:
            if self._counted_slots != slots:
                self._counted_slots, self._kept_all = slots, 0
                for use in self._uses.values():
                    use.kept = self._kept_for(use)
                    self._kept_all += use.kept
            kept = self._kept_all - own.kept
        if slots >= MANY and tenant != self.owner and self.owner not in self._uses:
            kept += 1
        return kept

    def _count(self, use: _Use) -> None:
        """Count what is kept for a tenant, whose use has changed."""
        kept = self._kept_for(use)
        self._kept_all += kept - use.kept
        use.kept = kept

    def _kept_for(self, use: _Use) -> int:
        return max(0, min(use.need, self._share(use.weight, self._counted_slots)) - use.running)
