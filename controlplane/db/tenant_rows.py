"""Let other stores check that a tenant exists. `registry/tenant_store.py` alone writes the table."""

from sqlalchemy import Connection, select

from controlplane.db import schema
from controlplane.registry.policy.access import TenantState
from kelvin.contracts.errors import NotFound, Refused


def find_tenant(connection: Connection, tenant: str) -> None:
    """Check that the tenant exists. Raises Refused(NotFound) for an unknown or deleted tenant."""
    table = schema.tenants
    known = select(table.c.tenant).where(table.c.tenant == tenant, table.c.state != TenantState.DELETED)
    if connection.execute(known).first() is None:
        raise Refused(NotFound("tenant", tenant[:63]))
