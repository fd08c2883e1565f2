"""How much may wait, in requests, bytes of their bodies and estimated tokens: per version, per tenant and in total.
Pure state. `routing/policy/request_body.py` estimates tokens.
"""

from dataclasses import dataclass, field
from typing import Final

from activator.queue.policy.queued_request import QueuedRequest


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """The most that may wait in a queue."""

    entries: int
    nbytes: int
    tokens: int


UNBOUNDED: Final = QueueLimit(1 << 60, 1 << 60, 1 << 60)


@dataclass(frozen=True, slots=True)
class ExceededLimit:
    """The unit of a limit that one more request would exceed, and the limit."""

    unit: str
    limit: int


@dataclass(slots=True)
class QueueUsage:
    """How much waits in a queue."""

    entries: int = 0
    nbytes: int = 0
    tokens: int = 0

    def exceeded_limit(self, queued_request: QueuedRequest, limit: QueueLimit) -> ExceededLimit | None:
        """Return the limit that one more request would exceed, or None."""
        if self.entries >= limit.entries:
            return ExceededLimit("requests", limit.entries)
        if self.nbytes + queued_request.nbytes > limit.nbytes:
            return ExceededLimit("bytes", limit.nbytes)
        if self.tokens + queued_request.tokens > limit.tokens:
            return ExceededLimit("tokens", limit.tokens)
        return None

    def is_over(self, limit: QueueLimit) -> bool:
        """Return whether more waits than `limit` allows."""
        return self.entries > limit.entries or self.nbytes > limit.nbytes or self.tokens > limit.tokens

    def add(self, queued_request: QueuedRequest) -> None:
        """Count a request that begins to wait."""
        self.entries += 1
        self.nbytes += queued_request.nbytes
        self.tokens += queued_request.tokens

    def remove(self, queued_request: QueuedRequest) -> None:
        """Subtract a request that no longer waits."""
        self.entries -= 1
        self.nbytes -= queued_request.nbytes
        self.tokens -= queued_request.tokens


@dataclass(slots=True)
class QueueUsageByTenant:
    """Usage of all queues together, in total and per tenant. Tenants without waiting requests use no memory."""

    total: QueueUsage = field(default_factory=QueueUsage)
    _tenants: dict[str, QueueUsage] = field(default_factory=dict)

    def usage_of(self, tenant: str) -> QueueUsage:
        """Return the usage of a tenant. Read it at once; it changes later."""
        return self._tenants.get(tenant) or QueueUsage()

    def add(self, queued_request: QueuedRequest) -> None:
        """Count a request that begins to wait."""
        self.total.add(queued_request)
        self._tenants.setdefault(queued_request.tenant, QueueUsage()).add(queued_request)

    def remove(self, queued_request: QueuedRequest) -> None:
        """Subtract a request that no longer waits."""
        self.total.remove(queued_request)
        usage = self._tenants[queued_request.tenant]
        usage.remove(queued_request)
        if not usage.entries:
            del self._tenants[queued_request.tenant]

    def check_integrity(self) -> None:
        """Assert that tenants add up to the total, and that no entry is empty."""
        usages = self._tenants.values()
        assert self.total.entries == sum(usage.entries for usage in usages)
        assert self.total.nbytes == sum(usage.nbytes for usage in usages)
        assert self.total.tokens == sum(usage.tokens for usage in usages)
        assert all(usage.entries > 0 for usage in usages)
