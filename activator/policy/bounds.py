"""How much may wait: requests, bytes of their bodies and tokens; for one version, of one tenant and in all. Pure state.

Tokens are `body`'s estimate.
"""

from dataclasses import dataclass, field
from typing import Final

from activator.policy.ask import Ask


@dataclass(frozen=True, slots=True)
class Bound:
    """How much may wait."""

    entries: int
    nbytes: int
    tokens: int


UNBOUNDED: Final = Bound(1 << 60, 1 << 60, 1 << 60)


@dataclass(frozen=True, slots=True)
class Full:
    """What there would be too much of, and how much of it may wait."""

    unit: str
    limit: int


@dataclass(slots=True)
class Load:
    """How much waits."""

    entries: int = 0
    nbytes: int = 0
    tokens: int = 0

    def lacks(self, ask: Ask, bound: Bound) -> Full | None:
        """Why one more may not wait; None where it may."""
        if self.entries >= bound.entries:
            return Full("requests", bound.entries)
        if self.nbytes + ask.nbytes > bound.nbytes:
            return Full("bytes", bound.nbytes)
        if self.tokens + ask.tokens > bound.tokens:
            return Full("tokens", bound.tokens)
        return None

    def is_over(self, bound: Bound) -> bool:
        """Whether more waits than may."""
        return self.entries > bound.entries or self.nbytes > bound.nbytes or self.tokens > bound.tokens

    def add(self, ask: Ask) -> None:
        """It waits."""
        self.entries += 1
        self.nbytes += ask.nbytes
        self.tokens += ask.tokens

    def remove(self, ask: Ask) -> None:
        """It waits no more."""
        self.entries -= 1
        self.nbytes -= ask.nbytes
        self.tokens -= ask.tokens


@dataclass(slots=True)
class Loads:
    """What waits in all queues together, and what each tenant has of it. Holds no tenant of whom nobody waits."""

    in_all: Load = field(default_factory=Load)
    _tenants: dict[str, Load] = field(default_factory=dict)

    def of(self, tenant: str) -> Load:
        """A tenant's; to be read, not kept."""
        return self._tenants.get(tenant) or Load()

    def add(self, ask: Ask) -> None:
        """It waits."""
        self.in_all.add(ask)
        self._tenants.setdefault(ask.tenant, Load()).add(ask)

    def remove(self, ask: Ask) -> None:
        """It waits no more."""
        self.in_all.remove(ask)
        own = self._tenants[ask.tenant]
        own.remove(ask)
        if not own.entries:
            del self._tenants[ask.tenant]

    def check_integrity(self) -> None:
        """The tenants' add up to all; none is empty."""
        loads = self._tenants.values()
        assert self.in_all.entries == sum(load.entries for load in loads)
        assert self.in_all.nbytes == sum(load.nbytes for load in loads)
        assert self.in_all.tokens == sum(load.tokens for load in loads)
        assert all(load.entries > 0 for load in loads)
