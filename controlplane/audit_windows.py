"""For how long which entries of the audit are kept: what is set, for a tenant or (as "") for every tenant without."""

from sqlalchemy import Connection, delete, insert, select

from contracts.errors import InvalidRequest, Refused
from controlplane import schema
from controlplane.policy.trail import DEFAULT_DAYS, MAX_DAYS, Window, least_days


def days_of(connection: Connection, tenant: str) -> dict[Window, int]:
    """Days by window: the tenant's own, else the installation's, else what we think."""
    table = schema.audit_windows
    found = dict(DEFAULT_DAYS)
    for owner in dict.fromkeys(("", tenant)):
        rows = connection.execute(select(table.c.window_name, table.c.days).where(table.c.tenant == owner))
        found |= {Window(row.window_name): row.days for row in rows}
    return found


def set_days(connection: Connection, tenant: str, days: dict[str, int | None]) -> None:
    """None is the installation's again (of the installation: what we think). Raises Refused(InvalidRequest)."""
    table = schema.audit_windows
    for name, value in days.items():
        window = _settable(name)
        if value is not None and not least_days(window) <= value <= MAX_DAYS:
            rule = f"must be {least_days(window)} to {MAX_DAYS} days"
            raise Refused(InvalidRequest(f"windows.{window}", str(value), rule))
        connection.execute(delete(table).where(table.c.tenant == tenant, table.c.window_name == str(window)))
        if value is not None:
            connection.execute(insert(table).values(tenant=tenant, window_name=str(window), days=value))


def _settable(name: str) -> Window:
    if name not in DEFAULT_DAYS:
        raise Refused(InvalidRequest("windows", f"'{name[:63]}'", f"must be some of {', '.join(DEFAULT_DAYS)}"))
    return Window(name)
