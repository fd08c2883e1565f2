"""How much may wait: requests, bytes of their bodies and tokens; for one version, of one tenant and in all. Pure state.

Tokens are `body`'s estimate.
"""

from dataclasses import dataclass, field
from typing import Final

from activator.queue.policy.queued_request import QueuedRequest


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """How much may wait."""

    entries: int
    nbytes: int
    tokens: int


UNBOUNDED: Final = QueueLimit(1 << 60, 1 << 60, 1 << 60)


@dataclass(frozen=True, slots=True)
class ExceededLimit:
    """What there would be too much of, and how much of it may wait."""

    unit: str
    limit: int


@dataclass(slots=True)
class QueueUsage:
    """How much waits."""

    entries: int = 0
    nbytes: int = 0
    tokens: int = 0

    def exceeded_limit(self, queued_request: QueuedRequest, bound: QueueLimit) -> ExceededLimit | None:
        """Why one more may not wait; None where it may."""
        if self.entries >= bound.entries:
            return ExceededLimit("requests", bound.entries)
        if self.nbytes + queued_request.nbytes > bound.nbytes:
            return ExceededLimit("bytes", bound.nbytes)
        if self.tokens + queued_request.tokens > bound.tokens:
            return ExceededLimit("tokens", bound.tokens)
        return None

    def is_over(self, bound: QueueLimit) -> bool:
        """Whether more waits than may."""
        return self.entries > bound.entries or self.nbytes > bound.nbytes or self.tokens > bound.tokens

    def add(self, queued_request: QueuedRequest) -> None:
        """It waits."""
        self.entries += 1
        self.nbytes += queued_request.nbytes
        self.tokens += queued_request.tokens

    def remove(self, queued_request: QueuedRequest) -> None:
        """It waits no more."""
        self.entries -= 1
        self.nbytes -= queued_request.nbytes
        self.tokens -= queued_request.tokens


@dataclass(slots=True)
class QueueUsageByTenant:
    """What waits in all queues together, and what each tenant has of it. Holds no tenant of whom nobody waits."""

    in_all: QueueUsage = field(default_factory=QueueUsage)
    _tenants: dict[str, QueueUsage] = field(default_factory=dict)

    def of(self, tenant: str) -> QueueUsage:
        """A tenant's; to be read, not kept."""
        return self._tenants.get(tenant) or QueueUsage()

    def add(self, queued_request: QueuedRequest) -> None:
        """It waits."""
        self.in_all.add(queued_request)
        self._tenants.setdefault(queued_request.tenant, QueueUsage()).add(queued_request)

    def remove(self, queued_request: QueuedRequest) -> None:
        """It waits no more."""
        self.in_all.remove(queued_request)
        own = self._tenants[queued_request.tenant]
        own.remove(queued_request)
        if not own.entries:
            del self._tenants[queued_request.tenant]

    def check_integrity(self) -> None:
        """The tenants' add up to all; none is empty."""
        loads = self._tenants.values()
        assert self.in_all.entries == sum(load.entries for load in loads)
        assert self.in_all.nbytes == sum(load.nbytes for load in loads)
        assert self.in_all.tokens == sum(load.tokens for load in loads)
        assert all(load.entries > 0 for load in loads)
