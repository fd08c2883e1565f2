"""Let the words of old entries go: an entry's digest stays, and with it the chain.

That they go is an entry itself, written first: the database refuses to empty an entry that none of these covers, and
whoever verifies the chain finds one that was emptied without.
"""

from sqlalchemy import Connection, func, select, update

from controlplane import schema
from controlplane.audit import SAID, Actor, record
from controlplane.audit_windows import days_of
from controlplane.policy.trail import DAY_S, Action, Window


def expire(connection: Connection, by: Actor, tenant: str, now_s: int) -> int:
    """Empty the tenant's entries that are older than their window. Return how many."""
    return sum(
        _expire(connection, by, tenant, window, days, now_s) for window, days in days_of(connection, tenant).items()
    )


def _expire(connection: Connection, by: Actor, tenant: str, window: Window, days: int, now_s: int) -> int:
    table = schema.audit
    before_s = now_s - days * DAY_S if days else now_s + 1
    old = (
        table.c.tenant == tenant,
        table.c.window_name == str(window),
        table.c.expired_at_s.is_(None),
        table.c.at_s < before_s,
    )
    count = int(connection.execute(select(func.count()).select_from(table).where(*old)).scalar_one())
    if count:
        told = {"before_s": (None, before_s), "days": (None, days), "entries": (None, count)}
        record(connection, by, now_s, tenant, Action.AUDIT_EXPIRED, str(window), changed=told)
        connection.execute(update(table).where(*old).values(expired_at_s=now_s, **dict.fromkeys(SAID, "")))
    return count


def tenants_of(connection: Connection) -> list[str]:
    """Every tenant of which there is a trail, deleted ones and the installation's own ("") included."""
    parts = [select(table.c.tenant).distinct() for table in (schema.audit, schema.audit_chains)]
    return sorted({tenant for part in parts for tenant in connection.execute(part).scalars()})
