"""What others ask of the table of tenants. Its one writer is `tenants`."""

from sqlalchemy import Connection, select

from controlplane.db import schema
from controlplane.registry.policy.access import TenantState
from kelvin.contracts.errors import NotFound, Refused


def find_tenant(connection: Connection, tenant: str) -> None:
    """Raises Refused(NotFound) where there is no such tenant, or none any more."""
    table = schema.tenants
    known = select(table.c.tenant).where(table.c.tenant == tenant, table.c.state != TenantState.DELETED)
    if connection.execute(known).first() is None:
        raise Refused(NotFound("tenant", tenant[:63]))
