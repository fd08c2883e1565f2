"""Limit what requests hold while they run: permits of their tenant, and shared capacity such as bytes of bodies. Use
from one event loop. The blocks are classes, because a generator would cost a request as much as the block's work.
"""

from typing import Final, Protocol

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Overloaded, TenantBusy

RETRY_AFTER_S: Final = 1.0


class ConcurrencyLimiter(Protocol):
    """Counts concurrent requests per tenant, in this process or together with other activators."""

    async def acquire_permit(self, tenant: str, limit: int | None) -> "Permit":
        """Return a block that counts one more request. Raises Refused(TenantBusy), here or in the block's entry."""
        ...


class LocalConcurrencyLimiter:
    """A `ConcurrencyLimiter` for a single activator. Tenants without requests use no memory."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<LocalConcurrencyLimiter tenants={len(self._running)} running={sum(self._running.values())}>"

    async def acquire_permit(self, tenant: str, limit: int | None) -> "Permit":
        """Return a block that counts one more request. Does not wait."""
        return Permit(self._running, tenant, limit)


class Permit:
    """One concurrent request of a tenant, as a block."""

    __slots__ = ("_limit", "_running", "_tenant")

    def __init__(self, running: dict[str, int], tenant: str, limit: int | None) -> None:
        self._running, self._tenant, self._limit = running, tenant, limit

    def __enter__(self) -> None:
        running = self._running.get(self._tenant, 0)
        if self._limit is not None and running >= self._limit:
            raise Refused(TenantBusy(self._limit, RETRY_AFTER_S))
        self._running[self._tenant] = running + 1

    def __exit__(self, *_: object) -> None:
        running = self._running.pop(self._tenant) - 1
        if running:
            self._running[self._tenant] = running


class SharedCapacity:
    """A limit on what all tenants' requests hold of one resource: bytes of bodies, or places for unread bodies.

    A tenant's first request only has to fit. Each further request must leave free as much as the tenant already holds
    (dynamic thresholds: Choudhury and Hahne, 1998). So slow bodies of one tenant, each of which reserves the most that
    it might need, do not shut out other tenants.
    """

    def __init__(self, limit: int, resource: str, unit: str = "") -> None:
        """`resource` and `unit` name the resource in a refusal."""
        self._limit = limit
        self._resource = resource
        self._unit = unit
        self._held = 0
        self._held_by_tenant: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<SharedCapacity held={self._held}/{self._limit} of {self._resource}>"

    def hold(self, tenant: str, amount: int) -> "CapacityPermit":
        """Return a context manager that holds `amount`. Entering raises Refused(Overloaded). `CapacityPermit.shrink`
        gives back what the request turns out not to need.
        """
        return CapacityPermit(self, tenant, amount)

    def adjust(self, tenant: str, amount: int) -> None:
        """Take `amount` more, or give it back if it is negative. Raises Refused(Overloaded) if it does not fit."""
        before = self._held_by_tenant.get(tenant, 0)
        taken = self._held + amount
        if amount > 0:
            if taken > self._limit:
                raise Refused(Overloaded(self._resource, self._limit, RETRY_AFTER_S, self._unit))
            if before and before + taken > self._limit:
                left = self._limit - self._held
                raise Refused(Overloaded(f"{self._resource} of your tenant", left, RETRY_AFTER_S, self._unit))
        self._held = taken
        if after := before + amount:
            self._held_by_tenant[tenant] = after
        elif before:
            del self._held_by_tenant[tenant]


class CapacityPermit:
    """A block that holds one request's part of a `SharedCapacity`."""

    __slots__ = ("_amount", "_capacity", "_tenant")

    def __init__(self, capacity: SharedCapacity, tenant: str, amount: int) -> None:
        self._capacity, self._tenant, self._amount = capacity, tenant, amount

    def __enter__(self) -> "CapacityPermit":
        self._capacity.adjust(self._tenant, self._amount)
        return self

    def __exit__(self, *_: object) -> None:
        self._capacity.adjust(self._tenant, -self._amount)

    def shrink(self, amount: int) -> None:
        """Hold only `amount` once the body is read. A body of unknown length held the maximum before."""
        if amount != self._amount:
            self._capacity.adjust(self._tenant, amount - self._amount)
            self._amount = amount
