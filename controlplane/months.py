"""Which months of which tenants are closed, and where what comes too late is booked instead."""

from collections import defaultdict
from collections.abc import Collection

from sqlalchemy import Connection, select

from controlplane.ledger_schema import closings
from controlplane.policy.month import month_after, month_of


class Closed:
    """The closed months of these tenants, as one transaction sees them."""

    def __init__(self, connection: Connection, tenants: Collection[str]) -> None:
        self._months: defaultdict[str, set[str]] = defaultdict(set)
        query = select(closings.c.tenant, closings.c.month).where(closings.c.tenant.in_(sorted(tenants)))
        for tenant, month in connection.execute(query):
            self._months[tenant].add(month)

    def of(self, tenant: str) -> Collection[str]:
        """Its closed months."""
        return self._months.get(tenant, frozenset[str]())

    def month_for(self, tenant: str, at_us: int) -> str:
        """The month in which something of that instant is booked: its own, or the next one that is open."""
        month = month_of(at_us)
        while month in self.of(tenant):
            month = month_after(month)
        return month
