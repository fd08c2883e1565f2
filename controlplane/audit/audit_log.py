"""The audit log as routes and loops use it: record entries that belong to no row, set windows, expire old bodies."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Final

from msgspec import json
from sqlalchemy import Connection, select

from controlplane import dependencies
from controlplane.audit.audit_entry_policy import AuditAction, Changed, changed_fields, created_fields
from controlplane.audit.audit_rows import (
    INSTALLATION_ACTOR,
    Actor,
    Event,
    audited_tenants,
    events,
    expire,
    record,
    set_window_days,
    window_days,
)
from controlplane.clock import Clock, ClockStepDetector
from controlplane.db import schema
from controlplane.db.database import Database
from controlplane.db.tenant_rows import find_tenant
from controlplane.ledger.policy.rating import PriceBook
from kelvin.contracts.accounting.audit_reports import AuditWindows
from kelvin.contracts.errors import NotFound, Refused
from kelvin.contracts.serving.control_messages import Principal
from kelvin.process.loops import record_error

log = logging.getLogger(__name__)

EXPIRY_INTERVAL_S: Final = 3600.0
RETRY_S: Final = 60.0


class AuditLog:
    """The audit log in the database. Changes of rows are not recorded here but in the row's own transaction."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def __repr__(self) -> str:
        return f"<AuditLog {self._database!r}>"

    async def add_entry(
        self,
        actor: Actor,
        tenant: str,
        action: AuditAction,
        subject: str,
        changed: Changed | None = None,
        detail: str = "",
    ) -> None:
        """Record an entry; durable on return. Call it before the action, once the action can't be refused any more."""
        now_s = self._clock.wall_s()
        await self._database.write(
            lambda connection: record(connection, actor, now_s, tenant, action, subject, detail, changed)
        )

    @asynccontextmanager
    async def record_around(
        self, actor: Actor, tenant: str, action: AuditAction, subject: str, changed: Changed
    ) -> AsyncIterator[None]:
        """Record an action of another service that may refuse it. The entry is written first, so that nothing happens
        unrecorded. If the block raises Refused, a second entry has the failure's code.
        """
        await self.add_entry(actor, tenant, action, subject, changed)
        try:
            yield
        except Refused as refused:
            await self.add_entry(actor, tenant, action, subject, detail=f"refused: {refused.failure.code}")
            raise

    async def record_access(self, actor: Actor, tenant: str, action: AuditAction) -> None:
        """Record in the tenant's chain that an operator read its data. Does nothing for the reader's own tenant."""
        if actor.tenant != tenant and tenant:
            now_s = self._clock.wall_s()

            def write(connection: Connection) -> None:
                if _is_known(connection, tenant):
                    record(connection, actor, now_s, tenant, action, tenant)

            await self._database.write(write)

    async def events(self, tenant: str, reader: Principal, limit: int, before: int | None) -> list[Event]:
        """Return the tenant's latest entries. See `audit_rows.events`."""
        return await self._database.read(lambda connection: events(connection, tenant, reader, limit, before))

    async def windows(self, tenant: str) -> AuditWindows:
        """Return the tenant's retention windows. Raises Refused(NotFound)."""

        def read(connection: Connection) -> AuditWindows:
            if tenant:
                find_tenant(connection, tenant)
            return _windows(connection, tenant)

        return await self._database.read(read)

    async def set_windows(self, actor: Actor, tenant: str, days: dict[str, int | None]) -> AuditWindows:
        """Set retention windows. The next expiry empties older bodies. Raises Refused: NotFound, InvalidRequest."""
        now_s = self._clock.wall_s()

        def write(connection: Connection) -> AuditWindows:
            if tenant:
                find_tenant(connection, tenant)
            before = _windows(connection, tenant)
            set_window_days(connection, tenant, days)
            after = _windows(connection, tenant)
            if changed := changed_fields(before.days, after.days):
                record(connection, actor, now_s, tenant, AuditAction.AUDIT_KEPT, tenant, changed=changed)
            return after

        return await self._database.write(write)

    async def expire(self, actor: Actor = INSTALLATION_ACTOR, tenant: str | None = None) -> dict[str, int]:
        """Empty expired entries of one tenant, or of all, with one transaction per tenant. Their digests stay. Return
        how many were emptied, by tenant, without zeros.

        If all are expired, an unexpected error of one tenant does not stop the others. Raises Refused(NotFound) for a
        tenant that never existed.
        """
        if tenant and not await self._database.read(lambda connection: _is_known(connection, tenant)):
            raise Refused(NotFound("tenant", tenant[:63]))
        tenants = [tenant] if tenant is not None else await self._database.read(audited_tenants)
        found: dict[str, int] = {}
        for each in tenants:
            now_s = self._clock.wall_s()
            try:
                count = await self._database.write(
                    lambda connection: expire(connection, actor, each, now_s),  # noqa: B023
                    silence_s=dependencies.STATEMENT_S,  # one statement, for however many entries
                )
            except Refused:
                raise
            except Exception as error:
                if tenant is not None:
                    raise
                record_error(error, f"audit of {each or 'the installation'}")
                continue
            if count:
                found[each] = count
        return found

    async def record_prices(self, book: PriceBook) -> None:
        """Record the installation's price book if it differs from the last recorded one."""
        digest = sha256(json.encode(book, order="deterministic")).hexdigest()[:16]
        c, now_s = schema.audit.c, self._clock.wall_s()
        query = (
            select(c.subject)
            .where(c.tenant == "", c.action == str(AuditAction.PRICES_CHANGED))
            .order_by(c.sequence.desc())
            .limit(1)
        )

        def write(connection: Connection) -> None:
            if connection.execute(query).scalar_one_or_none() != digest:
                changed = created_fields(currency=book.currency)
                record(connection, INSTALLATION_ACTOR, now_s, "", AuditAction.PRICES_CHANGED, digest, changed=changed)

        await self._database.write(write)

    async def run(self) -> None:
        """Expire old bodies every hour, until cancelled.

        An expired body can't be brought back, and the clock may be wrong until it is set. So the first expiry comes
        after an hour, and after a step of the clock the next one does, too.
        """
        steps, wait_s = ClockStepDetector(self._clock), EXPIRY_INTERVAL_S
        while True:
            await self._clock.sleep(wait_s)
            wait_s = EXPIRY_INTERVAL_S
            if by_us := steps.stepped_us():
                log.warning("the clock stepped; no audit entry expires for an hour", extra={"by_us": by_us})
                continue
            try:
                await self.expire()
            except Refused as refused:  # a full disk, a lock that another process holds
                log.error("old audit entries could not expire", extra={"error": str(refused)})
                wait_s = RETRY_S


def _is_known(connection: Connection, tenant: str) -> bool:
    """Return whether the tenant exists or existed."""
    query = select(schema.tenants.c.tenant).where(schema.tenants.c.tenant == tenant)
    return connection.execute(query).first() is not None


def _windows(connection: Connection, tenant: str) -> AuditWindows:
    return AuditWindows(
        tenant=tenant, days={str(window): days for window, days in window_days(connection, tenant).items()}
    )
