"""Store tenants: the only writer of their table. A tenant's name is a DNS label."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec import structs
from sqlalchemy import Connection, func, insert, select, update

from controlplane.audit import audit_rows
from controlplane.audit.audit_entry_policy import AuditAction
from controlplane.audit.audit_rows import Actor
from controlplane.db import schema
from controlplane.db.database import Database
from controlplane.db.json_columns import read_column, read_enum
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.grants import delete_grants_to
from controlplane.registry.key_rows import is_active
from controlplane.registry.policy.access import TenantState, check_empty, check_state_change
from kelvin.contracts.errors import CapacityExceeded, Conflict, NotFound, Refused
from kelvin.contracts.names import require_tenant_name
from kelvin.contracts.serving.control_messages import Feed, TenantLimits, TenantRow
from kelvin.contracts.wire import encode

MAX_TENANTS: Final = 10_000  # not counting deleted ones; the activator makes certificates for as many
DELIVERY_LIMIT_S: Final = 1.0  # a change waits so long for every activator to get it
_ACTIONS: Final = {TenantState.ACTIVE: AuditAction.TENANT_RESUMED, TenantState.SUSPENDED: AuditAction.TENANT_SUSPENDED}


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, and how many models and keys it has."""

    tenant: str
    state: TenantState
    created_at_s: int
    models: int
    keys: int  # active ones
    limits: TenantLimits

    def row(self) -> TenantRow:
        """Return the tenant as activators know it."""
        return TenantRow(tenant=self.tenant, suspended=self.state is TenantState.SUSPENDED, limits=self.limits)


class TenantStore:
    """Owns the table of tenants. Load it once before use."""

    def __init__(self, database: Database, feed: FeedHub) -> None:
        self._database = database
        self._feed = feed
        self._write_lock = asyncio.Lock()  # changes are published in the order in which they were stored
        self.on_limits_changed: Callable[[str], None] = lambda _: None  # called with the tenant, after publication

    async def load(self, now_s: int) -> None:
        """Publish all tenants. Raises UnreadableColumn."""
        self._feed.publish(Feed(tenants=tuple(tenant.row() for tenant in await self.all_tenants(now_s))))

    async def all_tenants(self, now_s: int) -> list[Tenant]:
        """Return every tenant that is not deleted, by name."""
        return await self._database.read(lambda connection: _load(connection, now_s))

    async def tenant_status(self, tenant: str, now_s: int) -> Tenant:
        """Return the tenant. Raises Refused(NotFound)."""
        return await self._database.read(lambda connection: _one(connection, tenant, now_s))

    async def create(self, actor: Actor, tenant: str, now_s: int) -> Tenant:
        """Create a tenant. Raises Refused: InvalidRequest, Conflict if the name is or was in use, CapacityExceeded."""
        require_tenant_name(tenant)

        def write(connection: Connection) -> Tenant:
            table = schema.tenants
            before = connection.execute(select(table.c.state).where(table.c.tenant == tenant)).scalar_one_or_none()
            if before is not None:
                rule = "was deleted, and its name is not given again" if before == TenantState.DELETED else "exists"
                raise Refused(Conflict(f"tenant '{tenant}'", rule))
            there = select(func.count()).select_from(table).where(table.c.state != TenantState.DELETED)
            count = connection.execute(there).scalar_one()
            if count >= MAX_TENANTS:
                raise Refused(CapacityExceeded("tenants", count + 1, MAX_TENANTS))
            insert_tenant(connection, actor, tenant, now_s)
            return _one(connection, tenant, now_s)

        async with self._write_lock:
            made = await self._database.write(write)
            self._feed.publish(Feed(tenants=(made.row(),)))
        return made

    async def set_state(self, actor: Actor, tenant: str, state: TenantState, now_s: int) -> Tenant:
        """Suspend or resume the tenant; idempotent. Returns once activators know it, or after DELIVERY_LIMIT_S.

        Raises Refused: NotFound, Conflict.
        """

        def write(connection: Connection) -> Tenant:
            before = _one(connection, tenant, now_s)
            if before.state is not state:
                check_state_change(tenant, state)
                _set_state(connection, tenant, state)
                audit_rows.record(connection, actor, now_s, tenant, _ACTIONS[state], tenant)
            return _one(connection, tenant, now_s)

        async with self._write_lock:
            moved = await self._database.write(write)
            revision = self._feed.publish(Feed(tenants=(moved.row(),)))
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return moved

    async def set_limits(self, actor: Actor, tenant: str, changes: dict[str, int | str | None], now_s: int) -> Tenant:
        """Set limits; None means the installation's setting. Returns as `set_state`. Raises Refused(NotFound)."""

        def write(connection: Connection) -> Tenant:
            before = _one(connection, tenant, now_s)
            news = {name: value for name, value in changes.items() if getattr(before.limits, name) != value}
            if news:
                limits = encode(structs.replace(before.limits, **news)).decode()
                connection.execute(
                    update(schema.tenants).where(schema.tenants.c.tenant == tenant).values(limits=limits)
                )
                detail = ", ".join(f"{name} {'default' if value is None else value}" for name, value in news.items())
                changed = {name: (getattr(before.limits, name), value) for name, value in news.items()}
                audit_rows.record(connection, actor, now_s, tenant, AuditAction.TENANT_LIMITED, tenant, detail, changed)
            return _one(connection, tenant, now_s)

        async with self._write_lock:
            limited = await self._database.write(write)
            revision = self._feed.publish(Feed(tenants=(limited.row(),)))
        self.on_limits_changed(tenant)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return limited

    async def limits(self, tenant: str) -> TenantLimits:
        """Return the tenant's limits. Raises Refused(NotFound)."""
        return (await self.tenant_status(tenant, 0)).limits

    async def delete(self, actor: Actor, tenant: str, now_s: int) -> None:
        """Delete the tenant and its grants. Raises Refused: NotFound, Conflict naming what is left of it."""

        def write(connection: Connection) -> None:
            _one(connection, tenant, now_s)
            check_state_change(tenant, TenantState.DELETED)
            check_empty(tenant, _models(connection, tenant), active_keys(connection, tenant, now_s))
            delete_grants_to(connection, actor, tenant, now_s)
            _set_state(connection, tenant, TenantState.DELETED)
            audit_rows.record(connection, actor, now_s, tenant, AuditAction.TENANT_DELETED, tenant)

        async with self._write_lock:
            await self._database.write(write)
            self._feed.publish(Feed(removed_tenants=(tenant,)))


def insert_tenant(connection: Connection, actor: Actor, tenant: str, now_s: int) -> None:
    """Insert a tenant, and record that for the audit."""
    values = {"tenant": tenant, "created_at_s": now_s, "state": str(TenantState.ACTIVE)}
    connection.execute(insert(schema.tenants).values(values))
    audit_rows.record(connection, actor, now_s, tenant, AuditAction.TENANT_CREATED, tenant)


def _set_state(connection: Connection, tenant: str, state: TenantState) -> None:
    connection.execute(update(schema.tenants).where(schema.tenants.c.tenant == tenant).values(state=str(state)))


def _one(connection: Connection, tenant: str, now_s: int) -> Tenant:
    found = _load(connection, now_s, tenant)
    if not found:
        raise Refused(NotFound("tenant", tenant[:63]))
    return found[0]


def _load(connection: Connection, now_s: int, only_tenant: str | None = None) -> list[Tenant]:
    table, keys, models = schema.tenants, schema.keys, schema.models
    good = select(func.count()).where(keys.c.tenant == table.c.tenant, is_active(now_s)).scalar_subquery()
    had = select(func.count()).where(models.c.tenant == table.c.tenant).scalar_subquery()
    wanted = select(table, had.label("models"), good.label("keys")).where(table.c.state != TenantState.DELETED)
    if only_tenant is not None:
        wanted = wanted.where(table.c.tenant == only_tenant)
    return [
        Tenant(
            row["tenant"],
            read_enum(row["state"], TenantState, f"the state of tenant {row['tenant']}"),
            row["created_at_s"],
            row["models"],
            row["keys"],
            read_column(row["limits"], TenantLimits, f"the limits of tenant {row['tenant']}"),
        )
        for row in connection.execute(wanted.order_by(table.c.tenant)).mappings()
    ]


def _models(connection: Connection, tenant: str) -> list[str]:
    table = schema.models
    return list(connection.execute(select(table.c.model).where(table.c.tenant == tenant).order_by("model")).scalars())


def active_keys(connection: Connection, tenant: str, now_s: int) -> list[str]:
    """Return the ids of the tenant's active keys, sorted."""
    c = schema.keys.c
    query = select(c.key_id).where(c.tenant == tenant, is_active(now_s)).order_by(c.key_id)
    return list(connection.execute(query).scalars())
